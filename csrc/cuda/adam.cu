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
  void *parameter, *mean, *square;
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

// The types of gradients, of moments, and of weights: void for none.
template <class GradientType, class MeanType, class SquareType, class WeightType>
struct Types {
  using Gradient = GradientType;
  using Mean = MeanType;
  using Square = SquareType;
  using Weight = WeightType;
};

// fp32 parameters, which are rounded to weights if there are any.
template <class Weight, int V>
struct WholeParameters {
  Pack<float, V> pack;

  __device__ __forceinline__ WholeParameters(const Pointers& t, int64_t at)
      : pack(load_pack<float, V>(static_cast<const float*>(t.parameter) + at)) {}
  __device__ __forceinline__ float operator[](int k) const { return pack.at[k]; }
  __device__ __forceinline__ static void store(const Pointers& t, int64_t at,
                                               const float (&values)[V]) {
    store_pack(static_cast<float*>(t.parameter) + at, narrow<float, V>(values));
    if constexpr (!std::is_void_v<Weight>)
      store_pack(static_cast<Weight*>(t.weight) + at, narrow<Weight, V>(values));
  }
};

// Parameters whose low bits are stored beside bf16 weights.
template <int V>
struct HalvedParameters {
  Pack<BFloat16, V> weight;
  Pack<int16_t, V> low;

  __device__ __forceinline__ HalvedParameters(const Pointers& t, int64_t at)
      : weight(load_pack<BFloat16, V>(static_cast<const BFloat16*>(t.weight) + at)),
        low(load_pack<int16_t, V>(static_cast<const int16_t*>(t.parameter) + at)) {}
  __device__ __forceinline__ float operator[](int k) const {
    return ParameterHalves{weight.at[k], low.at[k]}.parameter();
  }
  __device__ __forceinline__ static void store(const Pointers& t, int64_t at,
                                               const float (&values)[V]) {
    Pack<BFloat16, V> weight;
    Pack<int16_t, V> low;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const ParameterHalves halves = ParameterHalves::of(values[k]);
      weight.at[k] = halves.weight;
      low.at[k] = halves.low;
    }
    store_pack(static_cast<BFloat16*>(t.weight) + at, weight);
    store_pack(static_cast<int16_t*>(t.parameter) + at, low);
  }
};

template <class P, class Weight, int V>
using Parameters =
    std::conditional_t<std::is_same_v<P, float>, WholeParameters<Weight, V>, HalvedParameters<V>>;

// Updates V elements. Returns the largest magnitude of their new parameters.
template <class T, class P, int V>
__device__ __forceinline__ float step_values(const Pointers& t, const AdamStep& step, int64_t at) {
  using Gradient = typename T::Gradient;
  using Mean = typename T::Mean;
  using Square = typename T::Square;
  using Stored = Parameters<P, typename T::Weight, V>;
  float parameter[V], mean[V], square[V], gradient[V], largest = 0.0f;
  const Stored stored(t, at);
  widen(load_pack<Mean, V>(static_cast<const Mean*>(t.mean) + at), mean);
  widen(load_pack<Square, V>(static_cast<const Square*>(t.square) + at), square);
  widen(load_pack<Gradient, V>(static_cast<const Gradient*>(t.gradient) + at), gradient);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const AdamValue now = stepped(step, {stored[k], mean[k], square[k]}, gradient[k]);
    parameter[k] = now.parameter;
    mean[k] = now.mean;
    square[k] = now.square;
    largest = fmaxf(largest, fabsf(now.parameter));
  }
  Stored::store(t, at, parameter);
  store_pack(static_cast<Mean*>(t.mean) + at, narrow<Mean, V>(mean));
  store_pack(static_cast<Square*>(t.square) + at, narrow<Square, V>(square));
  return largest;
}

__device__ __forceinline__ bool is_aligned_to_packs(const Pointers& t) {
  const auto all = reinterpret_cast<uintptr_t>(t.parameter) | reinterpret_cast<uintptr_t>(t.mean) |
                   reinterpret_cast<uintptr_t>(t.square) | reinterpret_cast<uintptr_t>(t.gradient) |
                   reinterpret_cast<uintptr_t>(t.weight);
  return all % 16 == 0;
}

template <class T, class P, bool kAmax>
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
        largest = fmaxf(largest, fabsf(static_cast<const float*>(t.parameter)[at]));
  } else if (is_aligned_to_packs(t) && t.count % kElements == 0) {
    for (int64_t at = begin + threadIdx.x * kElements; at < end; at += kThreads * kElements)
      largest = fmaxf(largest, step_values<T, P, kElements>(t, step, at));
  } else {
    for (int64_t at = begin + threadIdx.x; at < end; at += kThreads)
      largest = fmaxf(largest, step_values<T, P, 1>(t, step, at));
  }
  if constexpr (kAmax) {
    __shared__ BlockAmax<kThreads / 32> of_block;
    of_block.leave(largest);
    __syncthreads();
    if (threadIdx.x == 0) atomic_max(t.amax, of_block.total());
  }
}

Pointers pointers_of(const AdamTensors& t) {
  return {t.parameter.data, t.mean.data,         t.square.data,      t.gradient.data,
          t.weight.data,    t.amax.ptr<float>(), t.parameter.numel()};
}

// Calls f(Tag of `Types`, Tag of the parameter, whether there are amaxes).
template <class F>
void dispatch(const AdamTensors& like, F&& f) {
  dispatch_high_precision(like.gradient.dtype, "adam", [&](auto gradient) {
    dispatch_states(like, [&](auto parameter, auto mean, auto square) {
      const auto call = [&](auto weight, auto amax) {
        f(Tag<Types<typename decltype(gradient)::type, typename decltype(mean)::type,
                    typename decltype(square)::type, typename decltype(weight)::type>>{},
          parameter, amax);
      };
      if constexpr (std::is_same_v<typename decltype(parameter)::type, int16_t>) {
        call(Tag<BFloat16>{}, std::false_type{});
      } else {
        if (like.amax) return call(Tag<void>{}, std::true_type{});
        if (!like.weight) return call(Tag<void>{}, std::false_type{});
        dispatch_high_precision(like.weight.dtype, "adam",
                                [&](auto weight) { call(weight, std::false_type{}); });
      }
    });
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
    dispatch(first, [&](auto types, auto parameter, auto amax) {
      using T = typename decltype(types)::type;
      using P = typename decltype(parameter)::type;
      launch_dependent(adam_kernel<T, P, amax()>, batch.tensors.blocks, kThreads, 0,
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
