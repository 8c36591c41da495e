// The one parallel loop of the CPU backend. Threads are std::thread, started per call: a CPU op
// runs for long enough, and nothing lives on to trouble a forked child.
#pragma once

#include <cstdint>
#include <functional>

namespace te {

// How many threads a loop may use; Python sets it from torch.get_num_threads(). At least 1.
void set_num_threads(int count);
int num_threads();

// Calls body(first, last) on disjoint parts of [0, count), each at least `grain` long. Exceptions
// of a part are rethrown here. Serial when one thread is enough, and in a forked child.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace te
