// The CUDA backend of a build without CUDA: every entry says so.
#include "core/error.h"
#include "cuda/left_out.h"
#include "cuda/runtime.h"
#include "ops/activation.h"
#include "ops/adam.h"
#include "ops/amax.h"
#include "ops/attention.h"
#include "ops/cast.h"
#include "ops/column_sum.h"
#include "ops/copy.h"
#include "ops/cross_entropy.h"
#include "ops/delayed_scaling.h"
#include "ops/dequantize.h"
#include "ops/dropout_add.h"
#include "ops/gemm.h"
#include "ops/gemm_tuning.h"
#include "ops/merge_parts.h"
#include "ops/moments.h"
#include "ops/norm.h"
#include "ops/one_shot.h"
#include "ops/peer_memory.h"
#include "ops/quantize.h"
#include "ops/quantize_blocks.h"
#include "ops/rope.h"
#include "ops/softmax.h"
#include "ops/sum_parts.h"
#include "ops/sum_squares.h"
#include "ops/transpose.h"

namespace te::cuda {
namespace {

[[noreturn]] void absent(const char* op) {
  fail(Kind::Unsupported, op, "got a CUDA tensor, but ", lack_of("CUDA"));
}

}  // namespace

bool built_with_cuda() { return false; }
DeviceLimits limits_of_device(int) { absent("device limits"); }
void set_device_switches(const DeviceSwitches&) {}
void set_library_path(std::string, std::string) {}
void relax_captures() {}

bool gemm(const GemmArgs&, Stream) { absent("gemm"); }
int64_t gemm_plan_count() { return 0; }
std::string gemm_problem() { absent("gemm"); }
GemmAlgorithm gemm_algorithm() { absent("gemm"); }
std::vector<GemmAlgorithm> gemm_guesses(int) { absent("gemm"); }
std::vector<GemmAlgorithm> gemm_neighbours(const GemmAlgorithm&) { absent("gemm"); }
bool gemm_use(const GemmAlgorithm&) { absent("gemm"); }
void gemm_use_guess() { absent("gemm"); }
void add_column_parts(const ColumnSums&, Stream) { absent("column_sum"); }
int64_t attention_graph_count() { return 0; }
std::string attention_refusal(const AttentionArgs&, const AttentionGradients*) {
  return lack_of("CUDA");
}
int64_t attention_workspace_bytes(const AttentionArgs&, const AttentionGradients*, Stream) {
  absent("attention");
}
void attention(const AttentionArgs&, const AttentionGradients*, const TensorView&, Stream) {
  absent("attention");
}
void activation_forward(const ActivationForwardArgs&, Stream) { absent("activation_forward"); }
void activation_backward(const ActivationBackwardArgs&, Stream) { absent("activation_backward"); }
void norm_forward(const NormForwardArgs&, Stream) { absent("norm_forward"); }
void norm_backward(const NormBackwardArgs&, Stream) { absent("norm_backward"); }
bool norm_takes_moments(const TensorView&, const TensorView&, const TensorView&) {
  absent("norm_forward");
}
void cast(const CastArgs&, Stream) { absent("cast"); }
void quantize(const QuantizeArgs&, Stream) { absent("quantize"); }
void quantize_many(const std::vector<QuantizeArgs>&, Stream) { absent("quantize_many"); }
void quantize_blocks(const QuantizeBlocksArgs&, Stream) { absent("quantize_blocks"); }
void dequantize(const DequantizeArgs&, Stream) { absent("dequantize"); }
void transpose(const TransposeArgs&, Stream) { absent("transpose"); }
void amax(std::span<const AmaxArgs>, Stream) { absent("amax"); }
void moments(const MomentsArgs&, Stream) { absent("moments"); }
void cast_moments(const CastMomentsArgs&, Stream) { absent("cast_moments"); }
void merge_rows(const MergeRowsArgs&, Stream) { absent("merge_rows"); }
void delayed_scaling_update(const DelayedScalingArgs&, Stream) { absent("delayed_scaling_update"); }
void gather_amax(const GatherAmaxArgs&, Stream) { absent("gather_amax"); }
void merge_parts(const MergePartsArgs&, Stream) { absent("merge_parts"); }
void rope(const RopeArgs&, Stream) { absent("rope"); }
void softmax_forward(const SoftmaxForwardArgs&, Stream) { absent("softmax_forward"); }
void softmax_backward(const SoftmaxBackwardArgs&, Stream) { absent("softmax_backward"); }
void adam(const AdamArgs&, Stream) { absent("adam"); }
void sum_squares(const SumSquaresArgs&, Stream) { absent("sum_squares"); }
void cross_entropy_forward(const CrossEntropyForwardArgs&, Stream) {
  absent("cross_entropy_forward");
}
void cross_entropy_backward(const CrossEntropyBackwardArgs&, Stream) {
  absent("cross_entropy_backward");
}
void dropout_add_forward(const DropoutAddForwardArgs&, Stream) { absent("dropout_add_forward"); }
void dropout_add_backward(const DropoutAddBackwardArgs&, Stream) { absent("dropout_add_backward"); }
void one_shot(const OneShotPiece&, Device, int64_t&, Stream) { absent("one_shot"); }
void peer_send(const Rows&, const PeerSlots&, int64_t, const PeerEvents&, Device, Stream) {
  absent("peer_send");
}
void peer_receive(const PeerSlots&, int64_t&, Device, Stream) { absent("peer_receive"); }
void peer_copy(const Rows&, const PeerSlot&, const PeerEvents&, Device, Stream) {
  absent("peer_copy");
}
void peer_release(const PeerSlots&, Device, Stream) { absent("peer_release"); }
void peer_finish(int64_t, Device, Stream) { absent("peer_finish"); }
void copy(const Rows&, const Rows&, Device, Stream) { absent("copy"); }
void zero(const Rows&, Device, Stream) { absent("zero"); }
void sum_parts(const SumParts&, Stream) { absent("sum_parts"); }

}  // namespace te::cuda
