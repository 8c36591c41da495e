// Adam for many tensors in few launches. A launch takes up to 48 tensors; each of its blocks
// updates 4096 elements of one tensor, in one pass over parameter, gradient and both moments.
#include "core/adam.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/tensor_batch.cuh"
#include "ops/adam.h"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // elements of an access: 16 bytes of fp32
constexpr int kRounds = 4;    // accesses of a thread
constexpr int64_t kBlock = int64_t{kThreads} * kElements * kRounds;  // elements of a block

struct Pointers {
  float *parameter, *mean, *square;
  const void* gradient;
  void* weight;
  float* amax;
  int64_t count;
};

struct Batch {
  TensorBatch<Pointers, 48> tensors;  // arguments of a kernel are at most 4 KiB
  AdamRules rules;
  const float *step, *rate, *factor, *found_inf;
};
static_assert(sizeof(Batch) <= 4096);

// Updates V elements. Returns the largest magnitude of their new parameters.
template <class G, class W, int V>
__device__ __forceinline__ float step_values(const Pointers& t, const AdamStep& step, int64_t at) {
  float parameter[V], mean[V], square[V], gradient[V], largest = 0.0f;
  widen(load_pack<float, V>(t.parameter + at), parameter);
  widen(load_pack<float, V>(t.mean + at), mean);
  widen(load_pack<float, V>(t.square + at), square);
  widen(load_pack<G, V>(static_cast<const G*>(t.gradient) + at), gradient);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const AdamValue now = stepped(step, {parameter[k], mean[k], square[k]}, gradient[k]);
    parameter[k] = now.parameter;
    mean[k] = now.mean;
    square[k] = now.square;
    largest = fmaxf(largest, fabsf(now.parameter));
  }
  store_pack(t.parameter + at, narrow<float, V>(parameter));
  store_pack(t.mean + at, narrow<float, V>(mean));
  store_pack(t.square + at, narrow<float, V>(square));
  if constexpr (!std::is_void_v<W>)
    store_pack(static_cast<W*>(t.weight) + at, narrow<W, V>(parameter));
  return largest;
}

__device__ __forceinline__ bool is_aligned_to_packs(const Pointers& t) {
  const auto all = reinterpret_cast<uintptr_t>(t.parameter) | reinterpret_cast<uintptr_t>(t.mean) |
                   reinterpret_cast<uintptr_t>(t.square) | reinterpret_cast<uintptr_t>(t.gradient) |
                   reinterpret_cast<uintptr_t>(t.weight);
  return all % 16 == 0;
}

template <class G, class W, bool kAmax>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ Batch batch) {
  follow_previous_kernel();
  const int index = batch.tensors.tensor_of(blockIdx.x);
  const Pointers t = batch.tensors.tensors[index];
  const AdamStep step =
      batch.rules.at(*batch.step, *batch.rate, batch.factor == nullptr ? 1.0f : *batch.factor);
  const int64_t begin = (blockIdx.x - batch.tensors.first_block[index]) * kBlock;
  const int64_t end = min(t.count, begin + kBlock);
  float largest = 0.0f;
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) {
    if constexpr (kAmax)
      for (int64_t at = begin + threadIdx.x; at < end; at += kThreads)
        largest = fmaxf(largest, fabsf(t.parameter[at]));
  } else if (is_aligned_to_packs(t) && t.count % kElements == 0) {
    for (int64_t at = begin + threadIdx.x * kElements; at < end; at += kThreads * kElements)
      largest = fmaxf(largest, step_values<G, W, kElements>(t, step, at));
  } else {
    for (int64_t at = begin + threadIdx.x; at < end; at += kThreads)
      largest = fmaxf(largest, step_values<G, W, 1>(t, step, at));
  }
  if constexpr (kAmax) {
    __shared__ BlockAmax<kThreads / 32> of_block;
    of_block.leave(largest);
    __syncthreads();
    if (threadIdx.x == 0) atomic_max(t.amax, of_block.total());
  }
}

Pointers pointers_of(const AdamTensors& t) {
  return {t.parameter.ptr<float>(), t.mean.ptr<float>(), t.square.ptr<float>(),
          t.gradient.data,          t.weight.data,       t.amax.ptr<float>(),
          t.parameter.numel()};
}

// Calls f(Tag of the gradients, Tag of the weights, whether there are amaxes), void for no weights.
template <class F>
void dispatch(const AdamTensors& like, F&& f) {
  dispatch_high_precision(like.gradient.dtype, "adam", [&](auto gradient) {
    if (like.amax) return f(gradient, Tag<void>{}, std::true_type{});
    if (!like.weight) return f(gradient, Tag<void>{}, std::false_type{});
    dispatch_high_precision(like.weight.dtype, "adam",
                            [&](auto weight) { f(gradient, weight, std::false_type{}); });
  });
}

}  // namespace

void adam(const AdamArgs& args, Stream stream) {
  const AdamTensors& first = args.tensors.front();
  const DeviceGuard guard(first.parameter.device);
  Batch batch;
  batch.rules = adam_rules(args.beta1, args.beta2, args.epsilon, args.decay, args.decoupled);
  batch.step = args.step.ptr<float>();
  batch.rate = args.rate.ptr<float>();
  batch.factor = args.factor.ptr<float>();
  batch.found_inf = args.found_inf.ptr<float>();
  const auto launch = [&] {
    if (batch.tensors.blocks == 0) return;
    dispatch(first, [&](auto gradient, auto weight, auto amax) {
      using G = typename decltype(gradient)::type;
      using W = typename decltype(weight)::type;
      launch_dependent(adam_kernel<G, W, amax()>, batch.tensors.blocks, kThreads, 0,
                       stream_of(stream), batch);
    });
    batch.tensors.clear();
  };
  for (const AdamTensors& tensors : args.tensors) {
    const int64_t count = tensors.parameter.numel();
    if (count > 0) batch.tensors.add(pointers_of(tensors), ceil_div(count, kBlock));
    if (batch.tensors.is_full()) launch();
  }
  launch();
}

}  // namespace te::cuda
