// parallel_for: the parallel loop of the CPU backend. Its threads are started once and then wait
// for the next loop. A forked child process starts its own threads.
#pragma once

#include <cstdint>
#include <functional>

namespace te {

// Sets the number of threads that a loop may use, at least 1. Python passes
// torch.get_num_threads().
void set_num_threads(int count);

// Calls body(first, last) for disjoint parts of [0, count), in parallel. Parts have at least
// `grain` elements (unless `count` is smaller), and depend only on `count`, `grain` and the number
// of threads. Rethrows the exception of a part. Several threads may call it at a time, and a body
// may call it, too.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace te
