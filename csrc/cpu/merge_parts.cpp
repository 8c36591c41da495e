// The CPU backend of merge_parts, which defines its results: see ops/merge_parts.h. Threads share
// the rows.
#include "ops/merge_parts.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "core/merge_math.h"
#include "core/parallel.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 15;

// A row of out, and the rows of the parts that have its token. weights[0] is the weight of out, and
// weights[1 + k] that of part k.
template <class Out, class Part>
struct Row {
  Out* out;
  float* log_sum_exp;  // null for a sum
  std::array<const Part*, kMostParts> parts{};
  float weights[1 + kMostParts] = {};
  bool fresh;

  Row(const MergePartsArgs& args, std::array<int64_t, 2> place, int64_t head)
      : out(args.out.ptr<Out>() + RowPlaces(args.out).at(place[0], place[1], head)),
        log_sum_exp(nullptr),
        fresh(args.fresh) {
    const TensorView& sums = args.log_sum_exp;
    if (sums) log_sum_exp = sums.ptr<float>() + RowPlaces(sums).at(place[0], place[1], head);
    for (float& weight : weights) weight = sums ? kNoKey : 0.0f;
    if (!args.fresh) weights[0] = sums ? *log_sum_exp : 1.0f;
    const auto axis = static_cast<size_t>(args.token_axis);
    for (size_t k = 0; k < args.parts.size(); ++k) {
      const TensorView& part = args.parts[k];
      std::array<int64_t, 2> own = place;
      own[axis] -= args.begins[k];
      if (own[axis] < 0 || own[axis] >= part.size(args.token_axis)) continue;
      parts[k] = part.ptr<Part>() + RowPlaces(part).at(own[0], own[1], head);
      weights[1 + k] = 1.0f;
      if (!sums) continue;
      const TensorView& own_sums = args.part_log_sum_exps[k];
      weights[1 + k] = own_sums.ptr<float>()[RowPlaces(own_sums).at(own[0], own[1], head)];
    }
  }

  void merge(int64_t size) {
    if (log_sum_exp) *log_sum_exp = shares_of(weights);
    const bool any =
        std::any_of(std::begin(weights), std::end(weights), [](float w) { return w != 0.0f; });
    if (!any && !fresh) return;
    const float start = any ? -0.0f : 0.0f;  // -0.0 changes no bit of the first summand
    for (int64_t i = 0; i < size; ++i) {
      float value = start;
      if (weights[0] != 0.0f) value = std::fma(weights[0], static_cast<float>(out[i]), value);
      for (size_t k = 0; k < kMostParts; ++k)
        if (weights[1 + k] != 0.0f)
          value = std::fma(weights[1 + k], static_cast<float>(parts[k][i]), value);
      out[i] = Out(value);
    }
  }
};

template <class Out, class Part>
void run(const MergePartsArgs& args) {
  const int64_t b = args.out.size(1), heads = args.out.size(2), size = args.out.size(3);
  const int64_t grain = kElementsPerThread / (size + 1) + 1;
  parallel_for(args.out.rows(), grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      Row<Out, Part>(args, {row / heads / b, row / heads % b}, row % heads).merge(size);
  });
}

}  // namespace

void merge_parts(const MergePartsArgs& args) {
  dispatch_high_precision(args.parts.front().dtype, "merge_parts", [&](auto tag) {
    using Part = typename decltype(tag)::type;
    if (args.out.dtype == DType::Float32) return run<float, Part>(args);
    run<Part, Part>(args);
  });
}

}  // namespace te::cpu
