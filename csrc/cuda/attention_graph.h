// Attention as a graph of cuDNN. attention_graph.cpp builds it with the headers of cudnn-frontend;
// attention_no_graph.cpp takes its place where they were missing.
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

  // Compiles what a call needs, in tenths of a second: not while a stream is captured. Throws
  // Kind::Unsupported where cuDNN finds only now that it cannot.
  virtual void build() = 0;
  virtual bool built() const = 0;

  // Of a graph that is built. The device of the graph must be current. One call at a time: calls
  // share a handle of cuDNN.
  virtual int64_t workspace_bytes() const = 0;
  virtual void run(AttentionPointers& pointers, void* workspace, cudaStream_t stream) = 0;
};

struct AttentionPlan {
  std::unique_ptr<AttentionGraph> graph;  // null where refused
  std::string refusal;
};

// Asks cuDNN whether it takes a problem; the graph is not built yet.
AttentionPlan plan_attention(const AttentionKey& key);

}  // namespace te::cuda
