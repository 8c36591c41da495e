// The CPU backend of rope, which defines its results: see ops/rope.h. Threads share the tokens.
#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "core/rope_math.h"
#include "core/rope_position.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 14;

template <class T, bool kBackward>
void rotate_head(const T* x, T* out, const float* cosine, const float* sine, const RopeShape& shape,
                 bool interleaved) {
  const int64_t half = shape.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : a + half;
    const RopePair y = rotate<kBackward>({static_cast<float>(x[a]), static_cast<float>(x[b])},
                                         {cosine[a], sine[a], cosine[b], sine[b]});
    out[a] = T(y.a);
    out[b] = T(y.b);
  }
  std::copy(x + shape.rotary_dim, x + shape.size, out + shape.rotary_dim);
}

template <class T, bool kBackward>
void run(const RopeArgs& args) {
  const RopeShape shape(args);
  const int64_t sequences = args.cu_seqlens ? args.cu_seqlens.numel() - 1 : shape.batch;
  const RopePositions positions{args.starts.ptr<int32_t>(), args.cu_seqlens.ptr<int32_t>(),
                                sequences, shape.positions};
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / (shape.heads * shape.size));
  parallel_for(shape.sequence * shape.batch, grain, [&](int64_t first, int64_t last) {
    std::vector<float> cosine(static_cast<size_t>(shape.rotary_dim)), sine(cosine.size());
    int64_t made = -1;  // the position whose cosines and sines were computed last
    for (int64_t token = first; token < last; ++token) {
      const int64_t s = token / shape.batch, b = token % shape.batch;
      if (const int64_t position = positions.of(s, b); position != made) {
        const float* angle = args.freqs.ptr<float>() + position * shape.rotary_dim;
        for (size_t i = 0; i < cosine.size(); ++i) {
          cosine[i] = std::cos(angle[i]);
          sine[i] = std::sin(angle[i]);
        }
        made = position;
      }
      const T* x = args.x.ptr<T>() + s * shape.x_sequence + b * shape.x_batch;
      T* out = args.out.ptr<T>() + s * shape.out_sequence + b * shape.out_batch;
      for (int64_t h = 0; h < shape.heads; ++h) {
        const T* from = x + h * shape.x_head;
        T* to = out + h * shape.size;
        if (h % args.period < args.rotated)
          rotate_head<T, kBackward>(from, to, cosine.data(), sine.data(), shape, args.interleaved);
        else
          std::copy(from, from + shape.size, to);
      }
    }
  });
}

}  // namespace

void rope(const RopeArgs& args) {
  dispatch_high_precision(args.x.dtype, "rope", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_bool(args.backward, [&](auto backward) { run<T, backward()>(args); });
  });
}

}  // namespace te::cpu
