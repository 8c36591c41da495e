// The one parallel loop of the CPU backend, on threads that wait for the next one; a forked child
// starts threads of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace te {

// How many threads a loop may use; Python sets it from torch.get_num_threads(). At least 1.
void set_num_threads(int count);

// Calls body(first, last) on disjoint parts of [0, count), each at least `grain` long, which depend
// on nothing but the three numbers. Exceptions of a part are rethrown here. Several threads may
// call it at a time, and a body may call it.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace te
