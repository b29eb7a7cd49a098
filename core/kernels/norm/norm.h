#pragma once
#include "kernels/rows.h"

// Contract: op norm_rows, arithmetic f32: out = layer_norm(x (+ residual)) * gamma + beta, a row at a time,
// with an optional narrow copy. Mean and variance in two passes over the row held in cache. Without beta it
// is the norm by the root mean square (Zhang and Sennrich 2019): no mean is taken away, and nothing is added.
namespace encast {

struct NormArgs {
  int64_t cols = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* residual = nullptr;  // or null
  int64_t residual_stride = 0;
  const float* gamma = nullptr;
  const float* beta = nullptr;  // or null: RMS norm
  float eps = 0;
  float* out = nullptr;  // may be x or residual
  int64_t out_stride = 0;
  NarrowOut narrow;
};

using NormFn = void (*)(const NormArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
