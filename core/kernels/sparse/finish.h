#pragma once
#include "kernels/gemm/epilogue.h"
#include "kernels/quantize/narrow_row.h"
#include "kernels/sparse/sparse.h"

// What gemm's epilogue does with sums (gemm/epilogue.h), for registers that hold one output of sixteen rows
// in place of one row's sixteen outputs. The operations on an element are the same, and so are its bits.
namespace encast {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The four outputs of a block. Vectors of a linear are padded to whole panels.
struct BlockOutputs {
  const float *scale, *bias;
  const int32_t* weight_sums;

  BlockOutputs(const GemmArgs& args, int64_t output)
      : scale(args.w_scale + output),
        bias(args.bias == nullptr ? kNoBias : args.bias + output),
        weight_sums(args.w_colsum + output) {}

 private:
  static constexpr float kNoBias[kBlockOutputs] = {};
};

// Scales and zero points of a tile's rows, in the order of the lanes of sums.
template <int kVectors>
struct alignas(64) TileRows {
  float scale[kVectors * 16];
  int32_t zero[kVectors * 16];

  // row_of(q, i): the row of lane i of vector q. The last row stands in for those that do not exist.
  template <class RowOf>
  void read(const GemmArgs& args, int64_t row, int64_t rows, RowOf row_of) {
    for (int i = 0; i < kVectors * 16; ++i) {
      const int64_t from = row + least(row_of(i / 16, i % 16), rows - 1);
      scale[i] = args.a_scale[from];
      zero[i] = args.a_zero[from];
    }
  }

  // Sums of an output, vector q, to values before the activation.
  [[gnu::always_inline]] F32x16 value(const BlockOutputs& outputs, int output, int q, __m512i sums) const {
    const I32x16 centred = I32x16{sums} - load_i32(zero + 16 * q) * set1(outputs.weight_sums[output]);
    return fma(to_f32(centred), load(scale + 16 * q) * set1(outputs.scale[output]),
               set1(outputs.bias[output]));
  }
};

// minus_bump with its tables in registers: as operands of each lookup they take the loads' ports.
struct CoarseForm {
  F32x16 table[3];

  explicit CoarseForm(const Bump& bump) {
    ENCAST_UNROLL for (int i = 0; i < 3; ++i) {
      table[i] = load(bump.c[i]);
      asm("" : "+v"(table[i].v));
    }
  }
  [[gnu::always_inline]] F32x16 operator()(F32x16 x) const {
    return minus_bump(x, [&](int i, I32x16 piece)
                             ENCAST_SIMD_BODY { return F32x16{_mm512_permutexvar_ps(piece.v, table[i].v)}; });
  }
};

// What is computed from these sums comes after what was computed before: clang would begin with all sums of a
// block, and store most of what it has.
ENCAST_SIMD void begin_after(__m512i (&sums)[kBlockOutputs]) {
  asm volatile("" : "+v"(sums[0]), "+v"(sums[1]), "+v"(sums[2]), "+v"(sums[3]));
}

ENCAST_SIMD F32x16 minus(F32x16 x) { return from_bits(bits(x) ^ set1(INT32_MIN)); }

// row_scale of sixteen rows; `below` is the smallest value without its sign.
struct VectorScale {
  F32x16 reciprocal, scale;
  I32x16 zero;
};
ENCAST_SIMD VectorScale vector_scale(bool symmetric, F32x16 above, F32x16 below) {
  const F32x16 steps = set1(symmetric ? 127.0f : 255.0f);
  const F32x16 extent = symmetric ? from_bits(max(bits(above), bits(below))) : above + below;
  const F32x16 reciprocal = steps / extent;
  const Mask16 finite = less(reciprocal, set1(__builtin_inff()));
  const Mask16 keeps = {static_cast<__mmask16>(finite.v | is_nan(reciprocal).v)};
  VectorScale of;
  of.reciprocal = select(keeps, reciprocal, set1(0.0f));
  of.scale = select(keeps, extent / steps, set1(0.0f));
  if (symmetric) {
    of.zero = set1(128);
  } else {
    const F32x16 zero = round(below * of.reciprocal);
    const Mask16 fits = {
        static_cast<__mmask16>(less_equal(set1(0.0f), zero).v & less_equal(zero, set1(255.0f)).v)};
    of.zero = select(fits, to_i32(zero), set1(0));
  }
  return of;
}

}  // namespace
}  // namespace encast
