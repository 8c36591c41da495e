// The CPU backend of sum_squares, which defines its results: see ops/sum_squares.h. Threads share
// the blocks of each tensor.
#include "ops/sum_squares.h"

#include <algorithm>

#include "core/parallel.h"

namespace te::cpu {
namespace {

template <class T>
float sum_of_squares(const T* x, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = static_cast<float>(x[i]);
    sum += value * value;
  }
  return static_cast<float>(sum);
}

}  // namespace

void sum_squares(const SumSquaresArgs& args) {
  float* sums = args.sums.ptr<float>();
  for (const TensorView& x : args.tensors) {
    const int64_t count = x.numel(), blocks = sum_squares_blocks(x);
    dispatch_high_precision(x.dtype, "sum_squares", [&](auto tag) {
      const auto* values = x.ptr<typename decltype(tag)::type>();
      parallel_for(blocks, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t begin = i * kSumSquaresBlock;
          sums[i] = sum_of_squares(values + begin, std::min(kSumSquaresBlock, count - begin));
        }
      });
    });
    sums += blocks;
  }
}

}  // namespace te::cpu
