// Takes the place of attention_graph.cpp in a build without the headers of cudnn-frontend: every
// problem is refused.
#include "cuda/attention_graph.h"
#include "cuda/left_out.h"

namespace te::cuda {

AttentionPlan plan_attention(const AttentionKey&) { return {nullptr, lack_of("cuDNN attention")}; }

}  // namespace te::cuda
