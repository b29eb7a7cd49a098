#pragma once
#include <cstdint>

// Contract: op rotary_rows, arithmetic f32: the first heads of a row turned in place by the angles of the
// row's position (src/encast/ir/ops.py, rotary), the columns behind them untouched. Of a pair (a, b) of
// columns i and head_dim / 2 + i come fnma(b, sin, a * cos) and fma(b, cos, a * sin).
namespace encast {

struct RotaryArgs {
  int64_t heads = 0, head_dim = 0;  // heads: that are turned; head_dim: even
  float* x = nullptr;
  int64_t x_stride = 0;
  const float* table = nullptr;  // [positions, head_dim]: cosines, then sines
  int64_t first = 0;             // the row at position 0
};

using RotaryFn = void (*)(const RotaryArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
