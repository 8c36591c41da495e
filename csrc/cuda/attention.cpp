// Attention on CUDA: finds the graph of a call in a cache, or builds it, and runs it.
// attention_graph.h says what a graph is.
#include "ops/attention.h"

#include <mutex>
#include <unordered_map>

#include "cuda/attention_graph.h"
#include "cuda/attention_rows.h"
#include "cuda/attention_scales.h"
#include "cuda/launch.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "attention";
using Slot = AttentionSlot;

void refuse_in_capture(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_of(stream), &status), kOp);
  require(status == cudaStreamCaptureStatusNone, Kind::Runtime, kOp,
          "expected a call of the same shapes before the capture of a CUDA graph (a warm-up), "
          "because what cuDNN needs cannot be built inside, got none");
}

// All graphs of the process. The lock is held while a graph is built or launched, because all
// graphs of a device share a handle.
class Plans {
 public:
  // Calls `use(plan)` under the lock. `before_planning()` is called first if there is no plan yet.
  template <class Use, class Before>
  decltype(auto) with(const AttentionKey& key, Use&& use, Before&& before_planning) {
    const std::scoped_lock lock(mutex_);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      before_planning();
      if (plans_.size() == kMost) plans_.clear();
      found = plans_.emplace(key, plan_attention(key)).first;
    }
    return use(found->second);
  }

  // Returns the graph of a plan, built if it was not yet. To be called under the lock of `with`.
  AttentionGraph& built(const AttentionPlan& plan, Stream stream) {
    require(plan.graph != nullptr, Kind::Unsupported, kOp, plan.refusal);
    if (!plan.graph->built()) {
      refuse_in_capture(stream);
      plan.graph->build();
      ++built_;
    }
    return *plan.graph;
  }

  int64_t count() const {
    const std::scoped_lock lock(mutex_);
    return built_;
  }

 private:
  static constexpr size_t kMost = 4096;  // bounds the memory of a model whose sizes never repeat
  mutable std::mutex mutex_;
  std::unordered_map<AttentionKey, AttentionPlan, AttentionKeyHash> plans_;
  int64_t built_ = 0;
};

Plans& plans() {
  static auto* plans = new Plans;  // never destroyed: cuDNN may be unloaded before it
  return *plans;
}

// The first part of the workspace: offsets and lengths of sequences, if there are any. The
// workspace of the graph follows.
class Layout {
 public:
  explicit Layout(const AttentionKey& key) : key_(key) {}

  int64_t bytes() const {
    if (!key_.padded) return 0;
    constexpr int64_t kAlignment = 512;
    const int64_t offsets = key_.packed ? kMostOffsets * offsets_bytes() : 0;
    const int64_t lengths = 2 * key_.batch * static_cast<int64_t>(sizeof(int32_t));
    return (offsets + lengths + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Writes them, and sets their addresses in `pointers`.
  void write(const AttentionArgs& args, const AttentionGradients* gradients,
             AttentionPointers& pointers, void* workspace, cudaStream_t stream) const;

 private:
  int64_t offsets_bytes() const { return (key_.batch + 1) * static_cast<int64_t>(sizeof(int64_t)); }

  const AttentionKey& key_;
};

void Layout::write(const AttentionArgs& args, const AttentionGradients* gradients,
                   AttentionPointers& pointers, void* workspace, cudaStream_t stream) const {
  if (!key_.padded) return;
  char* next = static_cast<char*>(workspace);
  const AttentionFormat format = args.settings.format;
  AttentionOffsets p;
  p.evenly = format != AttentionFormat::Thd;
  const auto add_offsets = [&](Slot slot, const AttentionStrides& strides, bool is_key) {
    const int64_t stride = p.evenly ? strides.batch : strides.token;
    p.offsets[p.count++] = {reinterpret_cast<int64_t*>(next), stride, is_key};
    at(pointers, slot) = next;
    next += offsets_bytes();
  };
  const auto add = [&](Slot slot, const TensorView& t, bool is_key) {
    add_offsets(slot, strides_of(t, format), is_key);
  };
  const int token = format == AttentionFormat::Bshd ? 1 : 0;
  const int64_t queries = args.query.size(token), keys = args.key.size(token);
  if (key_.packed) {
    const int64_t heads = key_.heads;
    add(Slot::QueryOffsets, args.query, false);
    add(Slot::KeyOffsets, args.key, true);
    add(Slot::ValueOffsets, args.value, true);
    add(Slot::OutOffsets, args.out, false);
    add_offsets(Slot::StatisticsOffsets, {.batch = queries * heads, .head = 1, .token = heads},
                false);
    if (gradients != nullptr) {
      add(Slot::GradQueryOffsets, gradients->query, false);
      add(Slot::GradKeyOffsets, gradients->key, true);
      add(Slot::GradValueOffsets, gradients->value, true);
    }
  }
  const auto side = [&](const AttentionSequences& sequences, Slot slot, int64_t tokens) {
    at(pointers, slot) = next;
    auto* lengths = reinterpret_cast<int32_t*>(next);
    next += key_.batch * static_cast<int64_t>(sizeof(int32_t));
    const int32_t* ends = sequences.ends ? sequences.ends.ptr<int32_t>() : nullptr;
    const int32_t* starts = sequences.starts ? sequences.starts.ptr<int32_t>() : nullptr;
    return AttentionOffsets::Ends{ends, starts, lengths, static_cast<int32_t>(tokens)};
  };
  p.query = side(args.query_sequences, Slot::QueryLengths, queries);
  p.key = side(args.key_sequences, Slot::KeyLengths, keys);
  p.real = p.evenly ? args.query.size(1 - token) : args.query_sequences.ends.numel() - 1;
  p.batch = key_.batch;
  write_offsets(p, stream);
}

// Scales and amaxes of FP8.
void add_fp8(AttentionPointers& pointers, const AttentionFp8& fp8, bool backward) {
  if (!fp8) return;
  float* const pairs = fp8.pairs.ptr<float>();
  const auto descale = [&](int row) { return pairs + 2 * row; };
  const auto scale = [&](int row) { return pairs + 2 * row + 1; };
  for (const Slot slot : {Slot::DescaleQuery, Slot::DescaleKey, Slot::DescaleValue})
    at(pointers, slot) = descale(0);
  at(pointers, Slot::DescaleSoftmax) = descale(1);
  at(pointers, Slot::ScaleSoftmax) = scale(1);
  at(pointers, Slot::DescaleOut) = descale(2);
  at(pointers, Slot::ScaleOut) = scale(2);
  float* const amaxes = amaxes_of(fp8, backward);
  if (!backward) {
    at(pointers, Slot::AmaxSoftmax) = amaxes;
    at(pointers, Slot::AmaxOut) = amaxes + 1;
    return;
  }
  at(pointers, Slot::DescaleGradOut) = descale(3);
  at(pointers, Slot::DescaleGradProduct) = descale(4);
  at(pointers, Slot::ScaleGradProduct) = scale(4);
  for (const Slot slot : {Slot::ScaleGradQuery, Slot::ScaleGradKey, Slot::ScaleGradValue})
    at(pointers, slot) = scale(5);
  at(pointers, Slot::AmaxGradProduct) = amaxes;
  at(pointers, Slot::AmaxGradQuery) = amaxes + 1;
  at(pointers, Slot::AmaxGradKey) = amaxes + 2;
  at(pointers, Slot::AmaxGradValue) = amaxes + 3;
}

AttentionPointers pointers_of(const AttentionArgs& args, const AttentionGradients* gradients) {
  AttentionPointers pointers{};
  at(pointers, Slot::Query) = args.query.data;
  at(pointers, Slot::Key) = args.key.data;
  at(pointers, Slot::Value) = args.value.data;
  at(pointers, Slot::Out) = args.out.data;
  at(pointers, Slot::Statistics) = args.statistics.data;
  at(pointers, Slot::Bias) = args.bias.data;
  at(pointers, Slot::Sink) = args.sink.data;
  if (args.seed) {
    at(pointers, Slot::Seed) = args.seed.data;
    at(pointers, Slot::Offset) = args.seed.ptr<int64_t>() + 1;
  }
  add_fp8(pointers, args.fp8, gradients != nullptr);
  if (gradients == nullptr) return pointers;
  at(pointers, Slot::GradOut) = gradients->out.data;
  at(pointers, Slot::GradQuery) = gradients->query.data;
  at(pointers, Slot::GradKey) = gradients->key.data;
  at(pointers, Slot::GradValue) = gradients->value.data;
  at(pointers, Slot::GradBias) = gradients->bias.data;
  at(pointers, Slot::GradSink) = gradients->sink.data;
  return pointers;
}

AttentionRows written_rows(const AttentionArgs& args, const AttentionGradients* gradients) {
  if (gradients == nullptr) {
    return {.rows = {args.out}, .count = 1, .statistics = args.statistics, .packed = args.packed()};
  }
  return {.rows = {gradients->query, gradients->key, gradients->value},
          .is_key = {false, true, true},
          .count = 3,
          .statistics = {}};
}

}  // namespace

int64_t attention_graph_count() { return plans().count(); }

std::string attention_refusal(const AttentionArgs& args, const AttentionGradients* gradients) {
  const DeviceGuard guard(args.query.device);
  const auto refusal = [](const AttentionPlan& plan) { return plan.refusal; };
  return plans().with(AttentionKey(args, gradients), refusal, [] {});
}

int64_t attention_workspace_bytes(const AttentionArgs& args, const AttentionGradients* gradients,
                                  Stream stream) {
  const DeviceGuard guard(args.query.device);
  const AttentionKey key(args, gradients);
  const auto bytes = [&](const AttentionPlan& plan) {
    return Layout(key).bytes() + plans().built(plan, stream).workspace_bytes();
  };
  return plans().with(key, bytes, [&] { refuse_in_capture(stream); });
}

void attention(const AttentionArgs& args, const AttentionGradients* gradients,
               const TensorView& workspace, Stream stream) {
  const DeviceGuard guard(args.query.device);
  const AttentionKey key(args, gradients);
  const Layout layout(key);
  AttentionPointers pointers = pointers_of(args, gradients);
  const bool backward = gradients != nullptr;
  layout.write(args, gradients, pointers, workspace.data, stream_of(stream));
  if (args.fp8) write_pairs(args.fp8, backward, stream_of(stream));
  void* scratch = static_cast<char*>(workspace.data) + layout.bytes();
  const auto run = [&](const AttentionPlan& plan) {
    plans().built(plan, stream).run(pointers, scratch, stream_of(stream));
  };
  plans().with(key, run, [&] { refuse_in_capture(stream); });
  if (args.query_sequences.ends) clear_rows(args, written_rows(args, gradients), stream_of(stream));
  if (args.fp8) raise_amaxes(args.fp8, backward, stream_of(stream));
}

}  // namespace te::cuda
