// TensorView: a borrowed tensor (pointer, dtype, device, sizes, strides). It owns nothing; the
// caller keeps the memory alive until the work enqueued on the stream has run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>

#include "core/dtype.h"

namespace te {

enum class DeviceType : int32_t { CPU = 1, CUDA = 2 };  // DLPack's numbers

struct Device {
  DeviceType type = DeviceType::CPU;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, Device d) {
  return d.type == DeviceType::CPU ? out << "cpu" : out << "cuda:" << d.index;
}

// The stream on which work is enqueued: a cudaStream_t on CUDA, ignored on the CPU.
struct Stream {
  void* handle = nullptr;
};

inline constexpr int kMaxRank = 8;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::Float32;
  Device device{};
  int32_t rank = -1;  // -1: absent (an optional tensor without a value)
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};

  explicit operator bool() const { return rank >= 0; }

  int64_t size(int axis) const { return sizes[static_cast<size_t>(axis < 0 ? axis + rank : axis)]; }
  int64_t stride(int axis) const {
    return strides[static_cast<size_t>(axis < 0 ? axis + rank : axis)];
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= sizes[static_cast<size_t>(i)];
    return n;
  }
  int64_t bytes() const { return numel() * size_of(dtype); }

  // The sizes of the tensor as a matrix: the last axis is a row, all others are merged into one.
  int64_t cols() const { return rank == 0 ? 1 : size(-1); }
  int64_t rows() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < rank; ++i) n *= sizes[static_cast<size_t>(i)];
    return n;
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      const auto axis = static_cast<size_t>(i);
      if (sizes[axis] != 1 && strides[axis] != expected) return numel() == 0;
      expected *= sizes[axis];
    }
    return true;
  }

  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }

  // The same bytes with another one-byte dtype: Python passes FP8 codes as uint8.
  TensorView as(DType other) const {
    TensorView view = *this;
    view.dtype = other;
    return view;
  }
};

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

struct ShapeOf {
  const TensorView& view;
};

inline std::ostream& operator<<(std::ostream& out, ShapeOf s) {
  out << '(';
  for (int i = 0; i < s.view.rank; ++i) out << (i ? ", " : "") << s.view.size(i);
  return out << ')';
}

// Prints as `1 element` or `8 elements`.
struct Elements {
  int64_t count;
};

inline std::ostream& operator<<(std::ostream& out, Elements e) {
  return out << e.count << (e.count == 1 ? " element" : " elements");
}

// Prints as `bfloat16 (8, 16) on cuda:0`, the form every error message uses.
inline std::ostream& operator<<(std::ostream& out, const TensorView& t) {
  if (!t) return out << "no tensor";
  return out << t.dtype << ' ' << ShapeOf{t} << " on " << t.device;
}

}  // namespace te
