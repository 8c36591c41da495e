// Calls that must follow one another, on whatever stream they are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

namespace te::cuda {

// Makes a stream wait for the last one, if that was another, and remembers it as the last one. What
// is captured has the order of its graph.
void follow_last_stream(int64_t& last, cudaStream_t stream, std::string_view op);

}  // namespace te::cuda
