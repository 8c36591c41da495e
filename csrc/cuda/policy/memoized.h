// Searches for launch policies take up to microseconds; a model asks for the same few shapes again
// and again.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

namespace te::cuda {

// search(shape), memoized for the last shapes of this thread, which are told apart by `hash`. No
// shape is equal to `Shape{}`.
template <class Shape, class Policy>
Policy memoized(const Shape& shape, int64_t hash, Policy (*search)(const Shape&)) {
  thread_local std::array<std::pair<Shape, Policy>, 8> known{};
  auto& [of, policy] = known[static_cast<uint64_t>(hash) % known.size()];
  if (!(of == shape)) {
    policy = search(shape);
    of = shape;
  }
  return policy;
}

}  // namespace te::cuda
