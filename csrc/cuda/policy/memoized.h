// A cache for launch policies: a search takes up to microseconds, and a model asks for the same few
// shapes again and again.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

namespace te::cuda {

// Returns search(shape). Each thread keeps the results of its last shapes, in a table whose entry
// is chosen by `hash`. `Shape{}` marks an empty entry, so no shape may be equal to it.
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
