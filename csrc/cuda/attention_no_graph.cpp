// Of a build without the headers of cudnn-frontend.
#include "cuda/attention_graph.h"
#include "cuda/left_out.h"

namespace te::cuda {

AttentionPlan plan_attention(const AttentionKey&) { return {nullptr, lack_of("cuDNN attention")}; }

}  // namespace te::cuda
