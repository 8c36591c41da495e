// Element types of tensors, and the switch from a run-time DType to a compile-time C++ type.
#pragma once

#include <cstdint>
#include <ostream>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/float16.h"
#include "core/float8.h"

namespace te {

// The values are part of the Python binding (`_C.DType`) and do not change.
enum class DType : int32_t {
  UInt8 = 0,
  Int32 = 1,
  Float32 = 2,
  Float16 = 3,
  BFloat16 = 4,
  Float8E4M3 = 5,
  Float8E5M2 = 6,
  Bool = 7,
  Int64 = 8,
  Float64 = 9,
  Int16 = 10,
};

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::UInt8:
    case DType::Bool:
    case DType::Float8E4M3:
    case DType::Float8E5M2: return 1;
    case DType::Float16:
    case DType::BFloat16:
    case DType::Int16: return 2;
    case DType::Int32:
    case DType::Float32: return 4;
    case DType::Int64:
    case DType::Float64: return 8;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::UInt8: return "uint8";
    case DType::Int32: return "int32";
    case DType::Float32: return "float32";
    case DType::Float16: return "float16";
    case DType::BFloat16: return "bfloat16";
    case DType::Float8E4M3: return "float8_e4m3";
    case DType::Float8E5M2: return "float8_e5m2";
    case DType::Bool: return "bool";
    case DType::Int64: return "int64";
    case DType::Float64: return "float64";
    case DType::Int16: return "int16";
  }
  return "unknown";
}

inline std::ostream& operator<<(std::ostream& out, DType t) { return out << name_of(t); }

constexpr bool is_fp8(DType t) { return t == DType::Float8E4M3 || t == DType::Float8E5M2; }
constexpr bool is_high_precision(DType t) {
  return t == DType::Float32 || t == DType::Float16 || t == DType::BFloat16;
}

// Largest finite value of an FP8 format: 448 or 57344.
constexpr float max_of(DType t) { return t == DType::Float8E4M3 ? 448.0f : 57344.0f; }

// Carries a type through a generic lambda: `using T = typename decltype(tag)::type`.
template <class T>
struct Tag {
  using type = T;
};

template <class F>
decltype(auto) dispatch_high_precision(DType t, std::string_view op, F&& f) {
  switch (t) {
    case DType::Float32: return f(Tag<float>{});
    case DType::Float16: return f(Tag<Half>{});
    case DType::BFloat16: return f(Tag<BFloat16>{});
    default: fail(Kind::Type, op, "expected float32, float16 or bfloat16, got ", t);
  }
}

template <class F>
decltype(auto) dispatch_fp8(DType t, std::string_view op, F&& f) {
  switch (t) {
    case DType::Float8E4M3: return f(Tag<E4M3>{});
    case DType::Float8E5M2: return f(Tag<E5M2>{});
    default: fail(Kind::Type, op, "expected float8_e4m3 or float8_e5m2, got ", t);
  }
}

template <class F>
decltype(auto) dispatch_bool(bool value, F&& f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace te
