#pragma once
#include "base/activation.h"
#include "kernels/rows.h"

// Contract: op gated_rows, arithmetic f32: out = activation(a) * b, where a is the first half of a row of x
// and b the second, with an optional narrow copy. Product and activation are rounded one after the other.
namespace encast {

struct GatedArgs {
  int64_t cols = 0;  // of out: x has twice as many
  const float* x = nullptr;
  int64_t x_stride = 0;
  Activation activation = Activation::none;
  bool exact = false;
  float* out = nullptr;  // not x
  int64_t out_stride = 0;
  NarrowOut narrow;
};

using GatedFn = void (*)(const GatedArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
