// The CPU backend of softmax, which defines its results: see ops/softmax.h. Threads share the rows.
#include "ops/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 15;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t grain_of(int64_t keys) { return kElementsPerThread / keys + 1; }

// The mask of one row: true = hidden.
struct MaskRow {
  const bool* hidden = nullptr;
  int64_t step = 0;

  bool operator[](int64_t key) const { return hidden != nullptr && hidden[key * step]; }
};

MaskRow mask_row(const TensorView& mask, int64_t row) {
  if (!mask) return {};
  const int64_t queries = mask.size(2), heads = mask.size(1);
  const int64_t query = row % queries, head = row / queries % heads, batch = row / queries / heads;
  return {
      mask.ptr<bool>() + batch * mask.stride(0) + head * mask.stride(1) + query * mask.stride(2),
      mask.stride(3)};
}

// Scaled scores of the visible keys, -Inf for all others; returns the largest, NaN ignored.
template <class T>
float scaled_scores(const SoftmaxForwardArgs& args, int64_t row, std::vector<float>& scores) {
  const int64_t keys = args.x.size(3);
  const T* x = args.x.ptr<T>() + row * keys;
  const MaskRow mask = mask_row(args.mask, row);
  const KeyRange seen = visible_keys(args.window, row % args.x.size(2), keys);
  std::fill(scores.begin(), scores.end(), -kInfinity);
  float largest = -kInfinity;
  for (int64_t j = seen.first; j < seen.end; ++j) {
    if (mask[j]) continue;
    const float score = args.scale * static_cast<float>(x[j]);
    scores[static_cast<size_t>(j)] = score;
    if (score > largest) largest = score;
  }
  return largest;
}

template <class T>
void forward_row(const SoftmaxForwardArgs& args, int64_t row, std::vector<float>& weights) {
  const float largest = scaled_scores<T>(args, row, weights);
  // If all scores are -Inf, 0 is subtracted: exp(-Inf - 0) is 0, where exp(-Inf + Inf) would be
  // NaN.
  const float shift = largest == -kInfinity ? 0.0f : largest;
  double sum = 0.0;
  for (float& weight : weights) {
    weight = std::exp(weight - shift);
    sum += static_cast<double>(weight);
  }
  const float inverse = sum == 0.0 ? 0.0f : static_cast<float>(1.0 / sum);
  T* y = args.y.ptr<T>() + row * args.x.size(3);
  for (size_t j = 0; j < weights.size(); ++j) y[j] = T(weights[j] * inverse);
}

template <class T>
void backward_row(const SoftmaxBackwardArgs& args, int64_t row) {
  const int64_t keys = args.dy.size(3);
  const T* dy = args.dy.ptr<T>() + row * keys;
  const T* y = args.y.ptr<T>() + row * keys;
  T* dx = args.dx.ptr<T>() + row * keys;
  double sum = 0.0;
  for (int64_t j = 0; j < keys; ++j)
    sum += static_cast<double>(static_cast<float>(dy[j])) * static_cast<float>(y[j]);
  const float dot = static_cast<float>(sum);
  for (int64_t j = 0; j < keys; ++j)
    dx[j] = T(args.scale * static_cast<float>(y[j]) * (static_cast<float>(dy[j]) - dot));
}

}  // namespace

void softmax_forward(const SoftmaxForwardArgs& args) {
  const int64_t keys = args.x.size(3);
  dispatch_high_precision(args.x.dtype, "softmax_forward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(args.x.rows(), grain_of(keys), [&](int64_t first, int64_t last) {
      std::vector<float> weights(static_cast<size_t>(keys));
      for (int64_t row = first; row < last; ++row) forward_row<T>(args, row, weights);
    });
  });
}

void softmax_backward(const SoftmaxBackwardArgs& args) {
  dispatch_high_precision(args.dy.dtype, "softmax_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(args.dy.rows(), grain_of(args.dy.size(3)), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) backward_row<T>(args, row);
    });
  });
}

}  // namespace te::cpu
