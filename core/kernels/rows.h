#pragma once
#include <cstdint>

// What the families that work a row at a time share.
namespace encast {

// A second, narrower copy of the output rows, made while they are in registers.
struct NarrowOut {
  enum class Kind : uint8_t { none, q8_symmetric, q8_zero_point, q8_fixed, bf16 };
  Kind kind = Kind::none;
  void* data = nullptr;  // u8 or bf16
  int64_t stride = 0;  // elements; columns up to round_up(cols, 64) are written (q8: the zero point, bf16: 0)
  float* scale = nullptr;   // [rows], q8 only
  int32_t* zero = nullptr;  // [rows], q8 only; 128 when symmetric
  float fixed_scale = 0;    // of every row, a normal number above 0: q8_fixed only
  int32_t fixed_zero = 0;   // 0 to 255
};

}  // namespace encast
