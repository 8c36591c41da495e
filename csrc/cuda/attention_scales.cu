#include "cuda/attention_scales.h"

#include "cuda/device/dependent_launch.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 32;

struct Pairs {
  const float* scales[AttentionFp8::kAllScales];  // null: kSoftmaxScale
  float* pairs;
  float* found;  // amaxes
  int scale_count, found_count;
};

__global__ void __launch_bounds__(kThreads) pairs_kernel(const __grid_constant__ Pairs args) {
  follow_previous_kernel();
  const int i = static_cast<int>(threadIdx.x);
  if (i < args.scale_count) {
    const float scale = args.scales[i] != nullptr ? *args.scales[i] : AttentionFp8::kSoftmaxScale;
    args.pairs[2 * i] = 1.0f / scale;
    args.pairs[2 * i + 1] = scale;
  }
  if (i < args.found_count) args.found[i] = 0.0f;
}

struct Amaxes {
  float* amaxes[AttentionFp8::kGradAmaxes];  // null if not asked for
  const float* found;
  int count;
};

// A single thread, because several entries may be the same amax.
__global__ void __launch_bounds__(kThreads) raise_kernel(const __grid_constant__ Amaxes args) {
  follow_previous_kernel();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < args.count; ++i)
    if (args.amaxes[i] != nullptr) *args.amaxes[i] = fmaxf(*args.amaxes[i], args.found[i]);
}

}  // namespace

void write_pairs(const AttentionFp8& fp8, bool backward, cudaStream_t stream) {
  Pairs args{.scales = {},
             .pairs = fp8.pairs.ptr<float>(),
             .found = amaxes_of(fp8, backward),
             .scale_count = AttentionFp8::scale_count(backward),
             .found_count = AttentionFp8::amax_count(backward)};
  for (size_t i = 0; i < fp8.scales.size(); ++i) args.scales[i] = fp8.scales[i].ptr<float>();
  launch_dependent(pairs_kernel, 1, kThreads, 0, stream, args);
}

void raise_amaxes(const AttentionFp8& fp8, bool backward, cudaStream_t stream) {
  Amaxes args{
      .amaxes = {}, .found = amaxes_of(fp8, backward), .count = AttentionFp8::amax_count(backward)};
  bool asked = false;
  for (size_t i = 0; i < fp8.amaxes.size(); ++i) {
    args.amaxes[i] = fp8.amaxes[i].ptr<float>();
    asked = asked || fp8.amaxes[i];
  }
  if (asked) launch_dependent(raise_kernel, 1, kThreads, 0, stream, args);
}

}  // namespace te::cuda
