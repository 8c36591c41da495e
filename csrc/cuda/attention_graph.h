// Attention as a graph of cuDNN. A graph describes one direction of attention, an SDPA operation in
// 16 bits or FP8, with the sizes and strides of its tensors. cuDNN compiles it to kernels, and a
// call runs it with one pointer for each AttentionSlot. attention_graph.cpp builds graphs with the
// headers of cudnn-frontend; a build without these headers has attention_no_graph.cpp instead.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "cuda/attention_key.h"

namespace te::cuda {

class AttentionGraph {
 public:
  AttentionGraph() = default;
  virtual ~AttentionGraph() = default;
  AttentionGraph(const AttentionGraph&) = delete;
  AttentionGraph& operator=(const AttentionGraph&) = delete;

  // Compiles the graph, which takes tenths of a second and is not possible while a CUDA graph is
  // captured. Throws Kind::Unsupported if cuDNN finds only now that it does not support the
  // problem.
  virtual void build() = 0;
  virtual bool built() const = 0;

  // Both need a graph that is built, with its device current. One call at a time: calls share a
  // handle of cuDNN.
  virtual int64_t workspace_bytes() const = 0;
  virtual void run(AttentionPointers& pointers, void* workspace, cudaStream_t stream) = 0;
};

struct AttentionPlan {
  std::unique_ptr<AttentionGraph> graph;  // null if cuDNN refuses the problem
  std::string refusal;
};

// Asks cuDNN whether it takes a problem; the graph is not built yet.
AttentionPlan plan_attention(const AttentionKey& key);

}  // namespace te::cuda
