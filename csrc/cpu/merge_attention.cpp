// The meaning of merge_attention: see ops/merge_attention.h. Rows are shared out among threads.
#include "ops/merge_attention.h"

#include "core/merge_math.h"
#include "core/parallel.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 15;

template <class Out, class Part>
void merge_row(Out* out, const Part* part, int64_t size, float share) {
  for (int64_t i = 0; i < size; ++i)
    out[i] = Out(merged(static_cast<float>(out[i]), static_cast<float>(part[i]), share));
}

template <class Out, class Part>
void run(const MergeAttentionArgs& args) {
  const int64_t b = args.out.size(1), heads = args.out.size(2), size = args.out.size(3);
  const RowPlaces out(args.out), part(args.part);
  const RowPlaces sums(args.log_sum_exp), part_sums(args.part_log_sum_exp);
  const int64_t grain = kElementsPerThread / (size + 1) + 1;
  parallel_for(args.log_sum_exp.numel(), grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t i = row / heads / b, j = row / heads % b, h = row % heads;
      float& sum = args.log_sum_exp.ptr<float>()[sums.at(i, j, h)];
      const float of_part = args.part_log_sum_exp.ptr<float>()[part_sums.at(i, j, h)];
      const float share = share_of_part(sum, of_part);
      sum = log_of_sum(sum, of_part);
      if (share == 0.0f || size == 0) continue;
      merge_row(args.out.ptr<Out>() + out.at(i, j, h), args.part.ptr<Part>() + part.at(i, j, h),
                size, share);
    }
  });
}

}  // namespace

void merge_attention(const MergeAttentionArgs& args) {
  dispatch_high_precision(args.part.dtype, "merge_attention", [&](auto tag) {
    using Part = typename decltype(tag)::type;
    if (args.out.dtype == DType::Float32) return run<float, Part>(args);
    run<Part, Part>(args);
  });
}

}  // namespace te::cpu
