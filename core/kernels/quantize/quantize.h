#pragma once
#include "kernels/rows.h"

// Contract: op narrow_rows, arithmetic f32: f32 rows to q8 (symmetric or with a zero point) or bf16.
// The formulas stand in the op table (src/encast/ir/ops.py: quantize, cast_bf16) and are met bit for bit.
namespace encast {

struct NarrowArgs {
  int64_t cols = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  NarrowOut out;
};

using NarrowFn = void (*)(const NarrowArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
