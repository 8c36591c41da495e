// Of a build without the headers of cudnn-frontend.
#include "cuda/attention_graph.h"

namespace te::cuda {

AttentionPlan plan_attention(const AttentionKey&) {
  return {nullptr,
          "this build lacks it: the headers of cudnn-frontend were not found; run pip install "
          "nvidia-cudnn-frontend, then install transformer-engine again"};
}

}  // namespace te::cuda
