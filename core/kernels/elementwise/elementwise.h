#pragma once
#include <cstdint>

#include "base/activation.h"

// Contract: op elementwise_rows, arithmetic f32: out = activation(factor * x (+ other)), a row at a time.
namespace encast {

struct ElementwiseArgs {
  int64_t cols = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  const float* other = nullptr;  // or null
  int64_t other_stride = 0;
  float factor = 1.0f;
  Activation activation = Activation::none;
  bool exact = false;
  float* out = nullptr;  // may be x or other
  int64_t out_stride = 0;
};

using ElementwiseFn = void (*)(const ElementwiseArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
