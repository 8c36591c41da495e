#include "cuda/attention_rows.h"

#include <limits>

#include "core/attention_window.h"
#include "cuda/device/dependent_launch.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// One thread for each sequence, and one more for the offset at which the last one ends.
__global__ void __launch_bounds__(kThreads) offsets_kernel(AttentionOffsets p) {
  follow_previous_kernel();
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b > p.batch) return;
  const int64_t known = b < p.real ? b : p.real;
  if (b < p.batch) {
    for (const auto* side : {&p.query, &p.key}) {
      const bool whole = side->ends == nullptr;
      side->lengths[b] = b >= p.real ? 0 : whole ? side->whole : side->ends[b + 1] - side->ends[b];
    }
  }
  for (int i = 0; i < p.count; ++i) {
    const auto& side = p.offsets[i].is_key ? p.key : p.query;
    const int32_t* starts = side.starts != nullptr ? side.starts : side.ends;
    p.offsets[i].at[b] = (p.evenly ? known : starts[known]) * p.offsets[i].stride;
  }
}

struct Side {
  const int32_t* ends;
  const int32_t* starts;
  int64_t rows;    // rows of the side's tensors
  int64_t tokens;  // tokens of a sequence; 0 for thd
};

// Rows are cleared in words of 16 bytes. A row is `heads` runs of `words`.
struct Cleared {
  uint4* data;
  int64_t words, heads;
  int64_t row_stride, head_stride;  // in words
  bool is_key;
};

struct ClearArgs {
  Side query, key;
  AttentionFormat format;
  int64_t batch;
  AttentionWindow window;
  bool bottom_right;
  Cleared tensors[3];
  float* statistics;
  bool packed;  // see AttentionRows
  int64_t heads;
};

struct TokenPosition {
  int64_t sequence, token;
};

// The last sequence that begins at the row or before it; -1 if there is none.
__device__ int64_t sequence_of(const int32_t* starts, int64_t batch, int64_t row) {
  int64_t first = 0, end = batch;  // the answer is in [first - 1, end)
  while (first < end) {
    const int64_t middle = (first + end) / 2;
    if (starts[middle] <= row)
      first = middle + 1;
    else
      end = middle;
  }
  return first - 1;
}

__device__ TokenPosition position_of(const ClearArgs& a, const Side& side, int64_t row) {
  if (a.format == AttentionFormat::Sbhd) return {row % a.batch, row / a.batch};
  if (a.format == AttentionFormat::Bshd) return {row / side.tokens, row % side.tokens};
  const int64_t sequence = sequence_of(side.starts, a.batch, row);
  return {sequence, sequence < 0 ? 0 : row - side.starts[sequence]};
}

__device__ bool is_dead(const ClearArgs& a, bool is_key, const TokenPosition& position) {
  if (position.sequence < 0) return true;
  const auto length = [&](const Side& side) {
    return static_cast<int64_t>(side.ends[position.sequence + 1] - side.ends[position.sequence]);
  };
  const int64_t keys = length(a.key);
  if (is_key) return position.token >= keys;
  const int64_t queries = length(a.query);
  if (position.token >= queries) return true;
  AttentionWindow window = a.window;
  if (a.bottom_right) window.diagonal = keys - queries;
  const KeyRange seen = visible_keys(window, position.token, keys);
  return seen.first == seen.end;
}

// One warp for each row of the tensor with number blockIdx.y. The statistics belong to the rows of
// the first tensor.
__global__ void __launch_bounds__(kThreads) clear_kernel(ClearArgs a) {
  follow_previous_kernel();
  const Cleared& tensor = a.tensors[blockIdx.y];
  const Side& side = tensor.is_key ? a.key : a.query;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (row >= side.rows) return;
  const TokenPosition position = position_of(a, side, row);
  if (!is_dead(a, tensor.is_key, position)) return;
  for (int64_t head = 0; head < tensor.heads; ++head) {
    uint4* run = tensor.data + row * tensor.row_stride + head * tensor.head_stride;
    for (int64_t i = lane; i < tensor.words; i += kWarp) run[i] = make_uint4(0, 0, 0, 0);
  }
  if (blockIdx.y != 0 || a.statistics == nullptr) return;
  const bool thd = a.format == AttentionFormat::Thd;
  const int64_t token = thd ? row : position.sequence * side.tokens + position.token;
  for (int64_t h = lane; h < a.heads; h += kWarp) {
    const int64_t at = a.packed ? token * a.heads + h
                                : (position.sequence * a.heads + h) * side.tokens + position.token;
    a.statistics[at] = std::numeric_limits<float>::infinity();
  }
}

Side side_of(const AttentionSequences& sequences, const TensorView& t, AttentionFormat format) {
  const TensorView& starts = sequences.starts ? sequences.starts : sequences.ends;
  const bool packed = format == AttentionFormat::Thd;
  return {.ends = sequences.ends.ptr<int32_t>(),
          .starts = starts.ptr<int32_t>(),
          .rows = packed ? t.size(0) : t.size(0) * t.size(1),
          .tokens = packed ? 0 : t.size(format == AttentionFormat::Sbhd ? 0 : 1)};
}

Cleared cleared_of(const TensorView& t, bool is_key) {
  const int64_t elements = static_cast<int64_t>(sizeof(uint4)) / size_of(t.dtype);
  const int64_t size = t.size(-1), heads = t.size(-2);
  const bool together = heads == 1 || t.stride(-2) == size;
  return {.data = static_cast<uint4*>(t.data),
          .words = (together ? heads : 1) * size / elements,
          .heads = together ? 1 : heads,
          .row_stride = t.stride(-3) / elements,
          .head_stride = t.stride(-2) / elements,
          .is_key = is_key};
}

}  // namespace

void write_offsets(const AttentionOffsets& offsets, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(offsets.batch + 1, kThreads));
  launch_dependent(offsets_kernel, blocks, kThreads, 0, stream, offsets);
}

void clear_rows(const AttentionArgs& args, const AttentionRows& rows, cudaStream_t stream) {
  const AttentionSettings& settings = args.settings;
  ClearArgs a{};
  a.query = side_of(args.query_sequences, args.query, settings.format);
  a.key = side_of(args.key_sequences, args.key, settings.format);
  a.format = settings.format;
  a.batch = args.query_sequences.ends.numel() - 1;
  a.window = {.left = settings.left, .right = settings.right};
  a.bottom_right = settings.bottom_right;
  a.heads = args.query.size(-2);
  a.statistics = rows.statistics ? rows.statistics.ptr<float>() : nullptr;
  a.packed = rows.packed;
  int64_t most = 0;
  for (int i = 0; i < rows.count; ++i) {
    const Side& side = rows.is_key[i] ? a.key : a.query;
    a.tensors[i] = cleared_of(rows.rows[i], rows.is_key[i]);
    most = side.rows > most ? side.rows : most;
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(most * kWarp, kThreads)),
                  static_cast<unsigned>(rows.count));
  launch_dependent(clear_kernel, grid, kThreads, 0, stream, a);
}

}  // namespace te::cuda
