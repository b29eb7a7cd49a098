#pragma once
#include <cstddef>
#include <cstdint>

namespace encast {

enum class DType : uint8_t {
#define ENCAST_DTYPE(name, bytes) name,
#include "base/dtype.inc"
#undef ENCAST_DTYPE
};

constexpr size_t element_bytes(DType dtype) {
  switch (dtype) {
#define ENCAST_DTYPE(name, bytes) \
  case DType::name:               \
    return bytes;
#include "base/dtype.inc"
#undef ENCAST_DTYPE
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
#define ENCAST_DTYPE(name, bytes) \
  case DType::name:               \
    return #name;
#include "base/dtype.inc"
#undef ENCAST_DTYPE
  }
  return "?";
}

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace encast
