// The CPU backend of moments, cast_moments and merge_rows, which defines their results: see
// ops/moments.h. Sums are taken in fp64 over chunks of a tensor. The chunks are then merged in
// order, so that no result depends on the number of threads.
#include "ops/moments.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"

namespace te::cpu {
namespace {

constexpr int64_t kChunk = 1 << 15;

bool is_active(const TensorView& flag) { return !flag || *flag.ptr<int32_t>() != 0; }

// Merges the rows of all chunks into `into`. of(first, last) computes the row of one chunk.
template <class Row, class Of>
void merge_chunks(int64_t count, Row& into, Of&& of) {
  const int64_t chunks = (count + kChunk - 1) / kChunk;
  std::vector<Row> rows(static_cast<size_t>(chunks));
  parallel_for(chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      rows[static_cast<size_t>(i)] = of(i * kChunk, std::min(count, (i + 1) * kChunk));
  });
  for (const Row& row : rows) merge(into, row);
}

template <class In>
Moments moments_of(const In* x, int64_t first, int64_t last) {
  const double pivot = pivot_from(static_cast<double>(static_cast<float>(x[first])));
  MomentSums sums = MomentSums::empty();
  for (int64_t i = first; i < last; ++i)
    sums.add(static_cast<double>(static_cast<float>(x[i])), pivot);
  return sums.about(pivot);
}

template <class In, class Fp8>
CastMoments cast_moments_of(const In* x, const uint8_t* codes, float scale_inverse, int64_t first,
                            int64_t last) {
  CastMoments row = CastMoments::empty();
  const float limit = overflow_limit(Fp8::kMax, scale_inverse);
  for (int64_t i = first; i < last; ++i) {
    const auto value = static_cast<float>(x[i]);
    const float decoded = Fp8::decode(codes[i]) * scale_inverse;
    const double error = static_cast<double>(value) - static_cast<double>(decoded);
    row.underflows += value != 0.0f && (codes[i] & 0x7f) == 0 ? 1 : 0;
    row.overflows += std::fabs(value) > limit ? 1 : 0;
    row.squared_error += error * error;
  }
  row.count = static_cast<double>(last - first);
  row.add_scale_inverse(static_cast<double>(scale_inverse));
  return row;
}

}  // namespace

void moments(const MomentsArgs& args) {
  if (!is_active(args.out.active)) return;
  dispatch_high_precision(args.x.dtype, "moments", [&](auto tag) {
    const auto* x = args.x.ptr<typename decltype(tag)::type>();
    merge_chunks(args.x.numel(), *args.out.row.ptr<Moments>(),
                 [&](int64_t first, int64_t last) { return moments_of(x, first, last); });
  });
}

void cast_moments(const CastMomentsArgs& args) {
  if (!is_active(args.out.active)) return;
  const float scale_inverse = args.scales.ptr<float>()[0];
  const auto* codes = args.codes.ptr<uint8_t>();
  dispatch_high_precision(args.x.dtype, "cast_moments", [&](auto in) {
    dispatch_fp8(args.format, "cast_moments", [&](auto out) {
      using In = typename decltype(in)::type;
      using Fp8 = typename decltype(out)::type;
      merge_chunks(
          args.x.numel(), *args.out.row.ptr<CastMoments>(), [&](int64_t first, int64_t last) {
            CastMoments row =
                cast_moments_of<In, Fp8>(args.x.ptr<In>(), codes, scale_inverse, first, last);
            if (!args.squared_error) row.squared_error = kNaN;
            return row;
          });
    });
  });
}

void merge_rows(const MergeRowsArgs& args) {
  if (!is_active(args.active)) return;
  const int64_t slots = args.into.size(0);
  const double* row = args.rows.ptr<double>();
  for (int64_t n = 0; n < args.rows.size(0); ++n) {
    for (int64_t slot = 0; slot < slots; ++slot, row += kRowFields) {
      const int64_t kind = args.kinds.ptr<int64_t>()[slot];
      require(0 <= kind && kind < kRowKinds, Kind::Value, "merge_rows",
              "expected kinds between 0 and ", kRowKinds - 1, ", got ", kind);
      merge(static_cast<RowKind>(kind), args.into.ptr<double>() + slot * kRowFields, row);
    }
  }
}

}  // namespace te::cpu
