#include "cuda/attention_graph.h"

#include <cudnn_frontend.h>

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/dynlib.h"
#include "cuda/launch.h"

void* cudnn_frontend::cudnn_dlhandle = nullptr;  // cudnn-frontend looks functions up in it

namespace te::cuda {
namespace {

namespace fe = cudnn_frontend;
using Slot = AttentionSlot;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

static_assert(CUDNN_FRONTEND_VERSION >= 13200);  // packaging/backend/cuda_toolkit.py has checked

constexpr const char* kOp = "attention";

void open_library() {
  static const auto* library = [] {
    auto* opened = new DynamicLibrary("CUDNN", concat("libcudnn.so.", CUDNN_MAJOR));
    fe::cudnn_dlhandle = opened->handle();
    return opened;
  }();
  static_cast<void>(library);
}

[[noreturn]] void fail_in(const char* call, const std::string& reason) {
  fail(Kind::Runtime, kOp, "cuDNN ", fe::detail::get_backend_version(), ": ", reason, " in ", call);
}

void check(cudnnStatus_t status, const char* call) {
  if (status != CUDNN_STATUS_SUCCESS) [[unlikely]]
    fail_in(call, concat("status ", static_cast<int>(status)));
}

// The cuDNN handle of `device`, which must be current; created once.
cudnnHandle_t handle_of(int64_t device) {
  static std::mutex mutex;
  static std::array<cudnnHandle_t, kMaxDevices> handles{};
  const std::scoped_lock lock(mutex);
  cudnnHandle_t& handle = handles.at(static_cast<size_t>(device));
  if (handle == nullptr) check(fe::detail::create_handle(&handle), "cudnnCreate");
  return handle;
}

fe::DataType_t data_type(int64_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::Float16: return fe::DataType_t::HALF;
    case DType::BFloat16: return fe::DataType_t::BFLOAT16;
    case DType::Float8E4M3: return fe::DataType_t::FP8_E4M3;
    case DType::Float8E5M2: return fe::DataType_t::FP8_E5M2;
    default: return fe::DataType_t::FLOAT;
  }
}

struct Sizes {
  int64_t batch, heads, tokens, size;
};

// Adds the tensors of one direction to a graph.
class Builder {
 public:
  explicit Builder(const AttentionKey& key) : key_(key) {
    graph_.set_io_data_type(data_type(key.dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void forward();
  void backward();
  void fp8_forward();
  void fp8_backward();

  fe::graph::Graph take() { return std::move(graph_); }

 private:
  Sizes query_sizes() const { return {key_.batch, key_.heads, key_.queries, key_.key_size}; }
  Sizes key_sizes() const { return {key_.batch, key_.groups, key_.keys, key_.key_size}; }
  Sizes value_sizes() const { return {key_.batch, key_.groups, key_.keys, key_.value_size}; }
  Sizes out_sizes() const { return {key_.batch, key_.heads, key_.queries, key_.value_size}; }

  // Where the sequences of a packed tensor begin; null for others. Made once for each slot.
  Tensor offsets(Slot slot);
  // Gives a tensor of the graph its sizes, strides and uid.
  void describe(const Tensor& tensor, Slot slot, const Sizes& sizes,
                const AttentionStrides& strides, Slot offsets_slot);
  void describe_statistics(const Tensor& tensor);
  Tensor input(Slot slot, const Sizes& sizes, const AttentionStrides& strides, Slot offsets_slot);
  // A small tensor of contiguous elements, `[a, b, c, d]`.
  Tensor plain(Slot slot, fe::DataType_t type, const std::array<int64_t, 4>& sizes);
  Tensor bias(Slot slot, int64_t dtype);
  // One fp32 number: a scale, or the amax that the graph writes.
  Tensor number(Slot slot) { return plain(slot, fe::DataType_t::FLOAT, {1, 1, 1, 1}); }
  static void describe_amax(const Tensor& tensor, Slot slot);
  // Query, key and value.
  std::array<Tensor, 3> inputs();
  // For the backward: the result, its gradient and the statistics.
  std::array<Tensor, 3> outputs_again();
  void describe_input_gradients(const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v);
  // Sets name, scale and mask: the options that all kinds of attributes have.
  template <class Attributes>
  void set_mask(Attributes& attributes);
  // Sets those and the other options, which only attention in 16 bits has.
  template <class Attributes>
  void set_options(Attributes& attributes);

  const AttentionKey& key_;
  fe::graph::Graph graph_;
  std::array<Tensor, static_cast<size_t>(Slot::Count)> places_{};
};

constexpr int64_t uid_of(Slot slot) { return static_cast<int64_t>(slot) + 1; }

constexpr bool is_gradient(Slot slot) { return slot >= Slot::GradOut && slot <= Slot::GradValue; }

Tensor Builder::offsets(Slot slot) {
  if (!key_.packed) return nullptr;
  Tensor& found = places_[static_cast<size_t>(slot)];
  if (!found) found = plain(slot, fe::DataType_t::INT64, {key_.batch + 1, 1, 1, 1});
  return found;
}

void Builder::describe(const Tensor& tensor, Slot slot, const Sizes& sizes,
                       const AttentionStrides& strides, Slot offsets_slot) {
  // cuDNN does not use the batch stride of a packed tensor, but it must be a plausible one.
  const int64_t batch = key_.packed ? strides.token * sizes.tokens : strides.batch;
  tensor->set_uid(uid_of(slot))
      .set_dim({sizes.batch, sizes.heads, sizes.tokens, sizes.size})
      .set_stride({batch, strides.head, strides.token, 1})
      .set_data_type(data_type(is_gradient(slot) ? key_.grad_dtype : key_.dtype));
  if (key_.packed) tensor->set_ragged_offset(offsets(offsets_slot));
}

void Builder::describe_statistics(const Tensor& tensor) {
  const int64_t h = key_.heads, s = key_.queries;
  const int64_t head = key_.packed ? 1 : s, token = key_.packed ? h : 1;
  tensor->set_uid(uid_of(Slot::Statistics))
      .set_dim({key_.batch, h, s, 1})
      .set_stride({h * s, head, token, 1})
      .set_data_type(fe::DataType_t::FLOAT);
  if (key_.packed) tensor->set_ragged_offset(offsets(Slot::StatisticsOffsets));
}

Tensor Builder::input(Slot slot, const Sizes& sizes, const AttentionStrides& strides,
                      Slot offsets_slot) {
  Tensor tensor = graph_.tensor(fe::graph::Tensor_attributes());
  describe(tensor, slot, sizes, strides, offsets_slot);
  return tensor;
}

Tensor Builder::plain(Slot slot, fe::DataType_t type, const std::array<int64_t, 4>& sizes) {
  const auto [a, b, c, d] = sizes;
  return graph_.tensor(fe::graph::Tensor_attributes()
                           .set_uid(uid_of(slot))
                           .set_dim({a, b, c, d})
                           .set_stride({b * c * d, c * d, d, 1})
                           .set_data_type(type));
}

Tensor Builder::bias(Slot slot, int64_t dtype) {
  return plain(slot, data_type(dtype), {key_.bias_batch, key_.bias_heads, key_.queries, key_.keys});
}

void Builder::describe_amax(const Tensor& tensor, Slot slot) {
  tensor->set_uid(uid_of(slot))
      .set_dim({1, 1, 1, 1})
      .set_stride({1, 1, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT)
      .set_output(true);
}

template <class Attributes>
void Builder::set_mask(Attributes& attributes) {
  attributes.set_name("attention").set_attn_scale(key_.scale());
  attributes.set_diagonal_alignment(key_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                      : fe::DiagonalAlignment_t::TOP_LEFT);
  // cuDNN counts the diagonal itself among the keys on the left.
  if (key_.left >= 0) attributes.set_diagonal_band_left_bound(static_cast<int>(key_.left) + 1);
  if (key_.right >= 0) attributes.set_diagonal_band_right_bound(static_cast<int>(key_.right));
}

template <class Attributes>
void Builder::set_options(Attributes& attributes) {
  set_mask(attributes);
  attributes.set_alibi_mask(key_.alibi != 0);
  if (key_.padded) {
    const std::array<int64_t, 4> lengths{key_.batch, 1, 1, 1};
    attributes.set_padding_mask(true)
        .set_seq_len_q(plain(Slot::QueryLengths, fe::DataType_t::INT32, lengths))
        .set_seq_len_kv(plain(Slot::KeyLengths, fe::DataType_t::INT32, lengths));
  }
  if (key_.dropout() > 0.0f) {
    const std::array<int64_t, 4> one{1, 1, 1, 1};
    attributes.set_dropout(key_.dropout(), plain(Slot::Seed, fe::DataType_t::INT64, one),
                           plain(Slot::Offset, fe::DataType_t::INT64, one));
  }
  if (key_.bias_batch) attributes.set_bias(bias(Slot::Bias, key_.bias_dtype));
  if (key_.sink)
    attributes.set_sink_token(plain(Slot::Sink, fe::DataType_t::FLOAT, {1, key_.heads, 1, 1}));
}

std::array<Tensor, 3> Builder::inputs() {
  return {input(Slot::Query, query_sizes(), key_.query, Slot::QueryOffsets),
          input(Slot::Key, key_sizes(), key_.key, Slot::KeyOffsets),
          input(Slot::Value, value_sizes(), key_.value, Slot::ValueOffsets)};
}

std::array<Tensor, 3> Builder::outputs_again() {
  const auto out = input(Slot::Out, out_sizes(), key_.out, Slot::OutOffsets);
  const auto grad_out = input(Slot::GradOut, out_sizes(), key_.out, Slot::OutOffsets);
  const auto statistics = graph_.tensor(fe::graph::Tensor_attributes());
  describe_statistics(statistics);
  return {out, grad_out, statistics};
}

void Builder::forward() {
  auto attributes = fe::graph::SDPA_attributes().set_generate_stats(key_.statistics != 0);
  set_options(attributes);
  const auto [q, k, v] = inputs();
  const auto [out, statistics] = graph_.sdpa(q, k, v, attributes);
  describe(out, Slot::Out, out_sizes(), key_.out, Slot::OutOffsets);
  out->set_output(true);
  if (!statistics) return;
  describe_statistics(statistics);
  statistics->set_output(true);
}

void Builder::backward() {
  fe::graph::SDPA_backward_attributes attributes;
  set_options(attributes);
  attributes.set_deterministic_algorithm(key_.deterministic != 0);
  if (key_.packed)
    attributes.set_max_total_seq_len_q(key_.query_tokens).set_max_total_seq_len_kv(key_.key_tokens);
  if (key_.bias_grad) {
    const Tensor grad = bias(Slot::GradBias, key_.dtype);
    attributes.set_dbias(grad);
    grad->set_output(true);
  }
  if (key_.sink_grad) {
    const Tensor grad = plain(Slot::GradSink, fe::DataType_t::FLOAT, {1, key_.heads, 1, 1});
    attributes.set_dsink_token(grad);
    grad->set_output(true);
  }
  const auto [q, k, v] = inputs();
  const auto [out, grad_out, statistics] = outputs_again();
  const auto [grad_q, grad_k, grad_v] =
      graph_.sdpa_backward(q, k, v, out, grad_out, statistics, attributes);
  describe_input_gradients(grad_q, grad_k, grad_v);
}

void Builder::describe_input_gradients(const Tensor& grad_q, const Tensor& grad_k,
                                       const Tensor& grad_v) {
  describe(grad_q, Slot::GradQuery, query_sizes(), key_.grad_query, Slot::GradQueryOffsets);
  describe(grad_k, Slot::GradKey, key_sizes(), key_.grad_key, Slot::GradKeyOffsets);
  describe(grad_v, Slot::GradValue, value_sizes(), key_.grad_value, Slot::GradValueOffsets);
  for (const auto& grad : {grad_q, grad_k, grad_v}) grad->set_output(true);
}

void Builder::fp8_forward() {
  auto attributes = fe::graph::SDPA_fp8_attributes().set_generate_stats(key_.statistics != 0);
  set_mask(attributes);
  const auto [q, k, v] = inputs();
  const auto [out, statistics, amax_softmax, amax_out] = graph_.sdpa_fp8(
      q, k, v, number(Slot::DescaleQuery), number(Slot::DescaleKey), number(Slot::DescaleValue),
      number(Slot::DescaleSoftmax), number(Slot::ScaleSoftmax), number(Slot::ScaleOut), attributes);
  describe(out, Slot::Out, out_sizes(), key_.out, Slot::OutOffsets);
  out->set_output(true);
  describe_amax(amax_softmax, Slot::AmaxSoftmax);
  describe_amax(amax_out, Slot::AmaxOut);
  if (!statistics) return;
  describe_statistics(statistics);
  statistics->set_output(true);
}

void Builder::fp8_backward() {
  fe::graph::SDPA_fp8_backward_attributes attributes;
  set_mask(attributes);
  attributes.set_deterministic_algorithm(key_.deterministic != 0);
  const auto [q, k, v] = inputs();
  const auto [out, grad_out, statistics] = outputs_again();
  const auto [grad_q, grad_k, grad_v, amax_q, amax_k, amax_v, amax_product] =
      graph_.sdpa_fp8_backward(
          q, k, v, out, grad_out, statistics, number(Slot::DescaleQuery), number(Slot::DescaleKey),
          number(Slot::DescaleValue), number(Slot::DescaleOut), number(Slot::DescaleGradOut),
          number(Slot::DescaleSoftmax), number(Slot::DescaleGradProduct),
          number(Slot::ScaleSoftmax), number(Slot::ScaleGradQuery), number(Slot::ScaleGradKey),
          number(Slot::ScaleGradValue), number(Slot::ScaleGradProduct), attributes);
  describe_input_gradients(grad_q, grad_k, grad_v);
  describe_amax(amax_q, Slot::AmaxGradQuery);
  describe_amax(amax_k, Slot::AmaxGradKey);
  describe_amax(amax_v, Slot::AmaxGradValue);
  describe_amax(amax_product, Slot::AmaxGradProduct);
}

std::string refusal(const std::string& message) {
  return concat("cuDNN ", fe::detail::get_backend_version(), " refuses: ", message);
}

// A known error of this release of cuDNN in a problem that it accepts; empty if none is known.
std::string known_error(const AttentionKey& key, size_t version) {
  if (version == 91000 || version == 91001) return "this release computes attention wrongly";
  const bool causal = key.right == 0 && !key.bottom_right && !key.padded;
  if (version >= 91300 && version < 91500 && key.keys > 1024 && !causal)
    return "this release reads other memory in CUDA graphs of more than 1024 keys";
  const int64_t size = key.value_size;
  const bool generic = size != 64 && size != 128 && size != 256;
  if (version < 92600 && key.sink_grad && key.packed && generic)
    return "this release computes wrong gradients of sinks with sequences and such heads of values";
  return "";
}

class CudnnAttention final : public AttentionGraph {
 public:
  CudnnAttention(fe::graph::Graph graph, cudnnHandle_t handle, bool clears)
      : graph_(std::move(graph)), handle_(handle), clears_(clears) {}

  void build() override {
    auto status = graph_.build_plans();
    if (status.is_bad()) fail(Kind::Unsupported, kOp, refusal(status.get_message()));
    for (const int64_t uid : graph_.get_variant_pack_uids_sorted())
      slots_.push_back(static_cast<size_t>(uid - 1));
    bytes_ = graph_.get_workspace_size();
  }

  bool built() const override { return bytes_ >= 0; }
  int64_t workspace_bytes() const override { return bytes_; }

  void run(AttentionPointers& pointers, void* workspace, cudaStream_t stream) override {
    std::array<void*, static_cast<size_t>(Slot::Count)> taken;
    for (size_t i = 0; i < slots_.size(); ++i) taken[i] = pointers[slots_[i]];
    check(fe::detail::set_stream(handle_, stream), "cudnnSetStream");
    if (clears_)
      cuda::check(cudaMemsetAsync(workspace, 0, static_cast<size_t>(bytes_), stream), kOp);
    auto status = graph_.execute(handle_, taken.data(), static_cast<int>(slots_.size()), workspace);
    if (status.is_bad()) [[unlikely]]
      fail_in("execute", status.get_message());
  }

 private:
  fe::graph::Graph graph_;
  cudnnHandle_t handle_;
  bool clears_;                // whether the workspace is zeroed before each run
  std::vector<size_t> slots_;  // in the order of the uids that the graph takes
  int64_t bytes_ = -1;
};

AttentionPlan plan(const AttentionKey& key) {
  open_library();
  const cudnnHandle_t handle = handle_of(key.device);
  const size_t version = fe::detail::get_backend_version();
  const std::string error = known_error(key, version);
  if (!error.empty()) return {nullptr, refusal(error)};
  Builder builder(key);
  if (key.fp8())
    key.backward ? builder.fp8_backward() : builder.fp8_forward();
  else
    key.backward ? builder.backward() : builder.forward();
  fe::graph::Graph graph = builder.take();
  fe::error_t status = graph.validate();
  if (status.is_good()) status = graph.build_operation_graph(handle);
  if (status.is_good()) status = graph.create_execution_plans({fe::HeurMode_t::A});
  if (status.is_good()) status = graph.check_support();
  if (status.is_bad()) return {nullptr, refusal(status.get_message())};
  // Before 9.18, the backward of packed sequences on Hopper adds to what its workspace contains.
  const bool clears = key.backward && key.packed && version < 91800;
  return {std::make_unique<CudnnAttention>(std::move(graph), handle, clears), ""};
}

}  // namespace

AttentionPlan plan_attention(const AttentionKey& key) {
  try {
    return plan(key);
  } catch (const Error& error) {  // the library cannot be opened
    return {nullptr, error.what()};
  } catch (const std::exception& error) {  // cudnn-frontend throws some of its errors
    return {nullptr, refusal(error.what())};
  }
}

}  // namespace te::cuda
