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

// The codes of a row, and its padding. code(x) may exceed a byte by what fits 32 bits.
template <class Code>
ENCAST_SIMD void store_codes(const NarrowOut& out, int64_t row, const float* x, int64_t cols, I32x16 zero,
                             Code code_of) {
  uint8_t* bytes = static_cast<uint8_t*>(out.data) + row * out.stride;
  const auto code = [&](int64_t col) ENCAST_SIMD_BODY { return code_of(load(x + col)); };
  int64_t col = 0;
  for (; col + 64 <= cols; col += 64) {
    const I32x16 codes[4] = {code(col), code(col + 16), code(col + 32), code(col + 48)};
    store_i32(reinterpret_cast<int32_t*>(bytes + col), pack_codes<false>(codes));
  }
  for (; col + 16 <= cols; col += 16) store_u8(bytes + col, code(col));
  if (col < cols) {
    store_u8(bytes + col, code_of(load_partial(x + col, cols - col)));
    col += 16;
  }
  for (; col % 64 != 0; col += 16) store_u8(bytes + col, zero);
}

ENCAST_SIMD void quantize_row(const NarrowOut& out, int64_t row, const float* x, int64_t cols,
                              const Extremes& extremes) {
  const RowScale scale = row_scale(out.kind, extremes);
  out.scale[row] = scale.scale;
  out.zero[row] = scale.zero;
  const F32x16 reciprocal = set1(scale.reciprocal);
  const I32x16 zero = set1(scale.zero);
  store_codes(out, row, x, cols, zero,
              [&](F32x16 some) ENCAST_SIMD_BODY { return to_i32(some * reciprocal) + zero; });
}

// A scale that was known before: one pass over the row, and what lies outside saturates. Clamped before they
// are rounded, because integers have no room for what may come. A NaN gives the row a NaN scale, as it does
// above.
ENCAST_SIMD void quantize_row_fixed(const NarrowOut& out, int64_t row, const float* x, int64_t cols) {
  const F32x16 reciprocal = set1(1.0f / out.fixed_scale);
  const F32x16 low = set1(static_cast<float>(-out.fixed_zero));
  const F32x16 high = set1(static_cast<float>(255 - out.fixed_zero));
  const I32x16 zero = set1(out.fixed_zero), magnitude_bits = set1(INT32_MAX);
  I32x16 largest = set1(0);
  store_codes(out, row, x, cols, zero, [&](F32x16 some) ENCAST_SIMD_BODY {
    largest = max(largest, bits(some) & magnitude_bits);
    return to_i32(min(max(some * reciprocal, low), high)) + zero;
  });
  const float found = magnitude(largest);
  out.scale[row] = found == found ? out.fixed_scale : found;
  out.zero[row] = out.fixed_zero;
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

// `extremes` are those of the row; they matter to q8 that is not fixed only.
ENCAST_SIMD void narrow_row(const NarrowOut& out, int64_t row, const float* x, int64_t cols,
                            const Extremes& extremes) {
  switch (out.kind) {
    case NarrowOut::Kind::none:
      return;
    case NarrowOut::Kind::q8_symmetric:
    case NarrowOut::Kind::q8_zero_point:
      return quantize_row(out, row, x, cols, extremes);
    case NarrowOut::Kind::q8_fixed:
      return quantize_row_fixed(out, row, x, cols);
    case NarrowOut::Kind::bf16:
      return round_row(out, row, x, cols);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
