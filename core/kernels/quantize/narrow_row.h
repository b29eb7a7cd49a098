#pragma once
#include "kernels/rows.h"
#include "simd/codes.h"
#include "simd/lanes.h"

// A finished f32 row to q8 or bf16: shared by every family that writes NarrowOut.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// Largest magnitudes among the values above and below zero, as bit patterns: for floats of one sign the
// order of values is the order of patterns, a NaN beats all of them, and no order of columns matters.
struct Extremes {
  I32x16 above, below;
};
ENCAST_SIMD Extremes no_extremes() { return {set1(0), set1(0)}; }
ENCAST_SIMD void include(Extremes& extremes, F32x16 x) {
  extremes.above = max(extremes.above, bits(x));
  extremes.below = max(extremes.below, bits(x) ^ set1(INT32_MIN));
}
ENCAST_SIMD float magnitude(I32x16 pattern) {
  const int32_t largest = reduce_max(pattern);
  float value;
  __builtin_memcpy(&value, &largest, sizeof value);
  return value;
}

// What a row is multiplied with, what it stands for and where its zero lies.
struct RowScale {
  float reciprocal, scale;
  int32_t zero;
};

// A row whose reciprocal overflows (all zeros, or below 1e-36) counts as zeros: scale 0. A NaN gives a NaN
// scale.
ENCAST_SIMD RowScale row_scale(NarrowOut::Kind kind, const Extremes& extremes) {
  const bool symmetric = kind == NarrowOut::Kind::q8_symmetric;
  const float above = magnitude(extremes.above), below = magnitude(extremes.below);
  const float steps = symmetric ? 127.0f : 255.0f;
  // Either of the two may be NaN; the sum keeps it, the larger of patterns does too.
  const float extent = symmetric ? magnitude(max(extremes.above, extremes.below)) : above + below;
  RowScale row = {steps / extent, extent / steps, symmetric ? 128 : 0};
  if (row.reciprocal == __builtin_inff()) row.reciprocal = row.scale = 0;
  if (!symmetric) {
    const float zero = __builtin_nearbyintf(below * row.reciprocal);
    row.zero = zero >= 0 && zero <= 255 ? static_cast<int32_t>(zero) : 0;
  }
  return row;
}

ENCAST_SIMD void quantize_row(const NarrowOut& out, int64_t row, const float* x, int64_t cols,
                              const Extremes& extremes) {
  const RowScale scale = row_scale(out.kind, extremes);
  out.scale[row] = scale.scale;
  out.zero[row] = scale.zero;
  const F32x16 reciprocal = set1(scale.reciprocal);
  const I32x16 zero = set1(scale.zero);
  uint8_t* bytes = static_cast<uint8_t*>(out.data) + row * out.stride;
  const auto code = [&](int64_t col) ENCAST_SIMD_BODY { return to_i32(load(x + col) * reciprocal) + zero; };
  int64_t col = 0;
  for (; col + 64 <= cols; col += 64) {
    const I32x16 codes[4] = {code(col), code(col + 16), code(col + 32), code(col + 48)};
    store_i32(reinterpret_cast<int32_t*>(bytes + col), pack_codes<false>(codes));
  }
  for (; col + 16 <= cols; col += 16) store_u8(bytes + col, code(col));
  if (col < cols) {
    store_u8(bytes + col, to_i32(load_partial(x + col, cols - col) * reciprocal) + zero);
    col += 16;
  }
  for (; col % 64 != 0; col += 16) store_u8(bytes + col, zero);
}

ENCAST_SIMD void round_row(const NarrowOut& out, int64_t row, const float* x, int64_t cols) {
  uint16_t* halves = static_cast<uint16_t*>(out.data) + row * out.stride;
  int64_t col = 0;
  for (; col + 16 <= cols; col += 16) store_bf16(halves + col, load(x + col));
  if (col < cols) {
    store_bf16(halves + col, load_partial(x + col, cols - col));
    col += 16;
  }
  for (; col % 64 != 0; col += 16) store_bf16(halves + col, set1(0.0f));
}

// `extremes` are those of the row; they matter to q8 only.
ENCAST_SIMD void narrow_row(const NarrowOut& out, int64_t row, const float* x, int64_t cols,
                            const Extremes& extremes) {
  switch (out.kind) {
    case NarrowOut::Kind::none:
      return;
    case NarrowOut::Kind::q8_symmetric:
    case NarrowOut::Kind::q8_zero_point:
      return quantize_row(out, row, x, cols, extremes);
    case NarrowOut::Kind::bf16:
      return round_row(out, row, x, cols);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
