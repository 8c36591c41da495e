// Keeps the order of calls that must run one after the other, whatever streams they are on.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

namespace te::cuda {

// Makes `stream` wait for the stream of the last call, if that was another one, and then sets
// `last` to it. It does nothing for a stream that is being captured: the graph has an order.
void follow_last_stream(int64_t& last, cudaStream_t stream, std::string_view op);

}  // namespace te::cuda
