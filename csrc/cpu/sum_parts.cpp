// The CPU backend of sum_parts, which defines its results: see ops/sum_parts.h.
#include "ops/sum_parts.h"

#include "core/parallel.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 16;

template <class T>
void run(const SumParts& sum) {
  const T* own = sum.own.ptr<T>();
  const T* bias = sum.bias ? sum.bias.ptr<T>() : nullptr;
  T* out = sum.out.ptr<T>();
  const int64_t cols = sum.own.cols();
  parallel_for(sum.own.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      float value = static_cast<float>(own[i]);
      for (int part = 0; part < sum.count; ++part)
        value += static_cast<float>(reinterpret_cast<const T*>(sum.first + part * sum.stride)[i]);
      if (bias) value += static_cast<float>(bias[i % cols]);
      out[i] = T(value);
    }
  });
}

}  // namespace

void sum_parts(const SumParts& sum) {
  dispatch_high_precision(sum.own.dtype, "sum_parts",
                          [&](auto tag) { run<typename decltype(tag)::type>(sum); });
}

}  // namespace te::cpu
