// The binary interface of DLPack 1.x and of its C exchange API, as far as this project reads it.
// Field order and sizes are the contract with the producer (torch >= 2.10); names are ours.
#pragma once

#include <cstdint>

namespace te::dlpack {

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kBool = 6,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 12,
};

struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* sizes;
  int64_t* strides;  // in elements; producers before 1.2 may give NULL for a contiguous tensor
  uint64_t byte_offset;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // an older table, for consumers that know only that one
};

struct ExchangeApi {
  ExchangeHeader header;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*view)(void* object, Tensor* out);  // borrowed; may be NULL
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

inline constexpr const char* kCapsuleName = "dlpack_exchange_api";
inline constexpr const char* kAttribute = "__dlpack_c_exchange_api__";

}  // namespace te::dlpack
