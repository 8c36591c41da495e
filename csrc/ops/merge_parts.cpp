#include "ops/merge_parts.h"

#include <algorithm>
#include <array>
#include <compare>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "merge_parts";

// Checks that `t` has the sizes of the first `rank` axes of out. If `tokens` is not negative, it is
// the expected size of the token axis.
void sized_like_out(const TensorView& t, const MergePartsArgs& args, int rank, int64_t tokens,
                    std::string_view name) {
  check::same_device(t, args.out, kOp, name);
  TensorView expected = args.out;
  expected.rank = rank;
  if (tokens >= 0) expected.sizes.at(static_cast<size_t>(args.token_axis)) = tokens;
  const auto end = expected.sizes.begin() + rank;
  require(t.rank == rank && std::equal(expected.sizes.begin(), end, t.sizes.begin()), Kind::Value,
          kOp, "expected shape ", ShapeOf{expected}, " for ", name, ", got ", ShapeOf{t});
}

void rows_side_by_side(const TensorView& t, std::string_view name) {
  require(t.size(-1) <= 1 || t.stride(-1) == 1, Kind::Value, kOp,
          "expected the elements of a row of ", name, " side by side, got a stride of ",
          t.stride(-1));
}

// Checks that no two elements share memory, because threads write them in any order.
void places_of_their_own(const TensorView& t, std::string_view name) {
  if (t.numel() == 0) return;
  struct Axis {
    int64_t stride = 0, size = 1;
    auto operator<=>(const Axis&) const = default;
  };
  std::array<Axis, 4> axes;
  for (int i = 0; i < t.rank; ++i) axes.at(static_cast<size_t>(i)) = {t.stride(i), t.size(i)};
  std::sort(axes.begin(), axes.end());
  int64_t reach = 1;  // elements from the first to the last one along the axes so far
  for (const auto [stride, size] : axes) {
    if (size == 1) continue;
    require(stride >= reach, Kind::Value, kOp, "expected ", name,
            " to have memory for each element, got ", t, " with a stride of ", stride, " over ",
            Elements{reach});
    reach += stride * (size - 1);
  }
}

// Checks part k. Its token axis may be shorter than that of out, but must be within it.
void check_part(const MergePartsArgs& args, size_t k) {
  const TensorView& part = args.parts[k];
  const DType dtype = args.parts.front().dtype;
  check::high_precision(part, kOp, "a part");
  check::dtype(part, dtype, kOp, "a part");
  require(args.out.dtype == dtype || args.out.dtype == DType::Float32, Kind::Type, kOp,
          "expected float32 or ", dtype, " for out, got ", args.out.dtype);
  require(part.rank == 4, Kind::Value, kOp, "expected a part of shape (a, b, heads, size), got ",
          ShapeOf{part});
  const int64_t tokens = part.size(args.token_axis), begin = args.begins[k];
  sized_like_out(part, args, 4, tokens, "a part");
  rows_side_by_side(part, "a part");
  require(begin >= 0 && begin + tokens <= args.out.size(args.token_axis), Kind::Value, kOp,
          "expected the tokens of a part among the ", args.out.size(args.token_axis),
          " of out, got ", tokens, " from token ", begin);
  if (args.part_log_sum_exps.empty()) return;
  const TensorView& sums = args.part_log_sum_exps[k];
  check::dtype(sums, DType::Float32, kOp, "the log_sum_exp of a part");
  sized_like_out(sums, args, 3, tokens, "the log_sum_exp of a part");
}

// Narrows out and log_sum_exp to the range of tokens that parts have. Other tokens keep their
// values.
MergePartsArgs of_tokens_of_parts(MergePartsArgs args) {
  const int axis = args.token_axis;
  int64_t first = args.out.size(axis), last = 0;
  for (size_t k = 0; k < args.parts.size(); ++k) {
    first = std::min(first, args.begins[k]);
    last = std::max(last, args.begins[k] + args.parts[k].size(axis));
  }
  for (TensorView* t : {&args.out, &args.log_sum_exp}) {
    if (!*t) continue;
    t->data = t->ptr<char>() + first * t->stride(axis) * size_of(t->dtype);
    t->sizes.at(static_cast<size_t>(axis)) = std::max<int64_t>(last - first, 0);
  }
  for (int64_t& begin : args.begins) begin -= first;
  return args;
}

}  // namespace

void merge_parts(const MergePartsArgs& args, Stream stream) {
  const size_t count = args.parts.size();
  check::high_precision(args.out, kOp, "out");
  require(args.out.rank == 4, Kind::Value, kOp, "expected out of shape (a, b, heads, size), got ",
          ShapeOf{args.out});
  rows_side_by_side(args.out, "out");
  places_of_their_own(args.out, "out");
  if (args.log_sum_exp) {
    check::dtype(args.log_sum_exp, DType::Float32, kOp, "log_sum_exp");
    sized_like_out(args.log_sum_exp, args, 3, -1, "log_sum_exp");
    places_of_their_own(args.log_sum_exp, "log_sum_exp");
  }
  require(args.token_axis == 0 || args.token_axis == 1, Kind::Value, kOp,
          "expected a token axis of 0 or 1, got ", args.token_axis);
  require(count >= 1 && count <= kMostParts, Kind::Value, kOp, "expected 1 to ", kMostParts,
          " parts, got ", count);
  require(args.begins.size() == count, Kind::Value, kOp, "expected a begin for each of ", count,
          " parts, got ", args.begins.size());
  const size_t sums = args.log_sum_exp ? count : 0;
  require(args.part_log_sum_exps.size() == sums, Kind::Value, kOp, "expected ", sums,
          " log-sum-exps of parts, got ", args.part_log_sum_exps.size());
  for (size_t k = 0; k < count; ++k) check_part(args, k);
  const MergePartsArgs found = args.fresh ? args : of_tokens_of_parts(args);
  if (found.out.rows() == 0) return;
  on_device<cpu::merge_parts, cuda::merge_parts>(found.out, found, stream);
}

}  // namespace te
