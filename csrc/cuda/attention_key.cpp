#include "cuda/attention_key.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/few_sizes.h"

namespace te::cuda {
namespace {

// Graphs are rounded up by less than a quarter.
int64_t round_up(int64_t n, int64_t least) { return round_to_few_sizes(std::max(n, least), 4); }

// The stride of an axis of one element is arbitrary, so it is replaced by one that every kernel
// accepts.
int64_t stride_of(const TensorView& t, int axis) {
  return t.size(axis) == 1 ? t.size(-1) : t.stride(axis);
}

// Whether the backward would compute with keys that do not exist. On Hopper, cuDNN (9.19 to 9.30)
// takes keys in tiles of 128, but masks those after the last key in tiles of 64. The unmasked ones
// have a score of 0, and exp(0 - log-sum-exp) overflows if all scores of a query are below -88:
// then the gradient of that query is NaN. Sequence lengths mask all of these keys, and so do causal
// masks.
bool misses_tail(const AttentionKey& key) {
  const bool is_masked = key.right == 0 && (key.bottom_right || key.queries <= key.keys);
  return key.keys % 128 == 64 && !key.fp8() && !is_masked;
}

int64_t bits_of(float value) { return std::bit_cast<int32_t>(value); }

}  // namespace

AttentionStrides strides_of(const TensorView& t, AttentionFormat format) {
  if (!t) return {};
  if (format == AttentionFormat::Thd)
    return {.batch = 0, .head = stride_of(t, 1), .token = stride_of(t, 0)};
  const int batch = format == AttentionFormat::Sbhd ? 1 : 0;
  return {.batch = stride_of(t, batch), .head = stride_of(t, 2), .token = stride_of(t, 1 - batch)};
}

AttentionKey::AttentionKey(const AttentionArgs& args, const AttentionGradients* gradients) {
  const AttentionSettings& settings = args.settings;
  const TensorView& q = args.query;
  const AttentionFormat format = settings.format;
  device = q.device.index;
  dtype = static_cast<int64_t>(q.dtype);
  backward = gradients != nullptr;
  packed = args.packed();
  set_sizes(args);
  heads = q.size(-2);
  groups = args.key.size(-2);
  key_size = q.size(-1);
  value_size = args.value.size(-1);
  left = settings.left;
  right = settings.right;
  bottom_right = settings.bottom_right;
  padded = packed || args.query_sequences.ends || (backward && misses_tail(*this));
  scale_bits = bits_of(settings.scale);
  dropout_bits = bits_of(settings.dropout);
  alibi = settings.alibi;
  deterministic = backward && settings.deterministic;
  statistics = static_cast<bool>(args.statistics);
  if (args.bias) {
    bias_batch = args.bias.size(0);
    bias_heads = args.bias.size(1);
    bias_dtype = static_cast<int64_t>(args.bias.dtype);
  }
  sink = static_cast<bool>(args.sink);
  const auto strides = [&](const TensorView& t) {
    AttentionStrides found = strides_of(t, format);
    if (packed) found.batch = 0;  // the offsets say where sequences begin
    return found;
  };
  query = strides(q);
  key = strides(args.key);
  value = strides(args.value);
  out = strides(args.out);
  if (!backward) return;
  grad_dtype = static_cast<int64_t>(gradients->out.dtype);
  bias_grad = static_cast<bool>(gradients->bias);
  sink_grad = static_cast<bool>(gradients->sink);
  grad_query = strides(gradients->query);
  grad_key = strides(gradients->key);
  grad_value = strides(gradients->value);
}

void AttentionKey::set_sizes(const AttentionArgs& args) {
  constexpr int64_t kLeastTokens = 64, kFewQueries = 16;
  const AttentionFormat format = args.settings.format;
  if (format == AttentionFormat::Thd) {
    batch = args.query_sequences.ends.numel() - 1;
    queries = args.query_sequences.longest;
    keys = args.key_sequences.longest;
  } else {
    const int token = format == AttentionFormat::Sbhd ? 0 : 1;
    batch = args.query.size(1 - token);
    queries = args.query.size(token);
    keys = args.key.size(token);
  }
  if (!packed) return;
  // Steps of generation read caches of one size, and cuDNN has kernels for a few queries.
  const bool thd = format == AttentionFormat::Thd;
  if (thd || queries > kFewQueries) {
    batch = round_up(batch, 1);
    queries = round_up(queries, kLeastTokens);
    keys = round_up(keys, kLeastTokens);
  }
  if (!backward) return;
  query_tokens = thd ? round_up(args.query.size(0), kLeastTokens) : batch * queries;
  key_tokens = thd ? round_up(args.key.size(0), kLeastTokens) : batch * keys;
}

float AttentionKey::scale() const { return std::bit_cast<float>(static_cast<int32_t>(scale_bits)); }

float AttentionKey::dropout() const {
  return std::bit_cast<float>(static_cast<int32_t>(dropout_bits));
}

size_t AttentionKeyHash::operator()(const AttentionKey& key) const {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: spreads close numbers
  uint64_t hash = 0;
  std::array<uint64_t, sizeof(AttentionKey) / sizeof(uint64_t)> words;
  std::memcpy(words.data(), &key, sizeof key);
  for (const uint64_t word : words) {
    hash = (hash ^ word) * kOdd;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace te::cuda
