// The CPU backend of dropout_add, which defines its results: see ops/dropout_add.h.
#include "ops/dropout_add.h"

#include <algorithm>
#include <vector>

#include "core/dropout.h"
#include "core/parallel.h"
#include "cpu/column_sum.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 16;

// Dropout of elements in ascending order. Neighbouring elements share a draw of random words, which
// is kept until the next group. With p == 0 nothing is drawn, and the seed may be absent.
class Dropout {
 public:
  Dropout(const TensorView& seed, float p)
      : rule_(dropout_rule(p)),
        seed_(p == 0.0f ? 0 : static_cast<uint64_t>(*seed.ptr<int64_t>())) {}

  float operator()(float value, int64_t element) {
    return dropout(value, rule_.threshold == 0 ? 0 : bits_of(static_cast<uint64_t>(element)),
                   rule_);
  }

 private:
  uint32_t bits_of(uint64_t element) {
    if (element / kElementsPerDraw != group_) {
      group_ = element / kElementsPerDraw;
      words_ = random_words(seed_, group_);
    }
    return random_bits(words_, static_cast<int>(element % kElementsPerDraw));
  }

  DropoutRule rule_;
  uint64_t seed_;
  uint64_t group_ = ~uint64_t{0};
  PhiloxWords words_{};
};

template <class In, class Out>
void forward(const DropoutAddForwardArgs& args) {
  const In* x = args.x.ptr<In>();
  const In* bias = args.bias ? args.bias.ptr<In>() : nullptr;
  const Out* residual = args.residual ? args.residual.ptr<Out>() : nullptr;
  Out* out = args.out.ptr<Out>();
  const int64_t cols = args.x.cols();
  parallel_for(args.x.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
    Dropout drop(args.seed, args.p);
    for (int64_t i = first; i < last; ++i) {
      float value = static_cast<float>(x[i]);
      if (bias) value += static_cast<float>(bias[i % cols]);
      value = drop(value, i);
      if (residual) value += static_cast<float>(residual[i]);
      out[i] = Out(value);
    }
  });
}

// The fp32 gradient, before dx and dbias round it.
template <class In>
std::vector<float> gradient_of(const DropoutAddBackwardArgs& args) {
  const In* dout = args.dout.ptr<In>();
  std::vector<float> gradient(static_cast<size_t>(args.dout.numel()));
  parallel_for(args.dout.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
    Dropout drop(args.seed, args.p);
    for (int64_t i = first; i < last; ++i)
      gradient[static_cast<size_t>(i)] = drop(static_cast<float>(dout[i]), i);
  });
  return gradient;
}

}  // namespace

void dropout_add_forward(const DropoutAddForwardArgs& args) {
  dispatch_high_precision(args.x.dtype, "dropout_add_forward", [&](auto in) {
    dispatch_high_precision(args.out.dtype, "dropout_add_forward", [&](auto out) {
      forward<typename decltype(in)::type, typename decltype(out)::type>(args);
    });
  });
}

void dropout_add_backward(const DropoutAddBackwardArgs& args) {
  constexpr const char* kOp = "dropout_add_backward";
  const std::vector<float> gradient = dispatch_high_precision(args.dout.dtype, kOp, [&](auto in) {
    return gradient_of<typename decltype(in)::type>(args);
  });
  if (args.dx) {
    dispatch_high_precision(args.dx.dtype, kOp, [&](auto out) {
      using Out = typename decltype(out)::type;
      std::transform(gradient.begin(), gradient.end(), args.dx.ptr<Out>(),
                     [](float value) { return Out(value); });
    });
  }
  if (args.dbias) {
    const int64_t cols = args.dout.cols();
    column_sum(args.dbias, args.dout.rows(), cols,
               [&](int64_t i, int64_t j) { return gradient[static_cast<size_t>(i * cols + j)]; });
  }
}

}  // namespace te::cpu
