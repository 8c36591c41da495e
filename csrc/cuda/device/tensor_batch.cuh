// Many tensors in one launch: the kernel gets their descriptions as arguments, and each block finds
// the tensor that its elements belong to.
#pragma once

#include <cstdint>

namespace te::cuda {

template <class Tensor, int kMost>
struct TensorBatch {
  Tensor tensors[kMost];
  unsigned first_block[kMost];
  int size = 0;
  unsigned blocks = 0;

  bool is_full() const { return size == kMost; }
  void add(const Tensor& tensor, int64_t blocks_of_it) {
    tensors[size] = tensor;
    first_block[size++] = blocks;
    blocks += static_cast<unsigned>(blocks_of_it);
  }
  void clear() { size = 0, blocks = 0; }

  // The last tensor whose blocks begin at or before this one.
  __device__ __forceinline__ int tensor_of(unsigned block) const {
    int low = 0, high = size - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_block[middle] <= block)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
};

}  // namespace te::cuda
