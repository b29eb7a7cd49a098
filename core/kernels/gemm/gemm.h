#pragma once
#include <cstdint>

#include "base/activation.h"
#include "base/dtype.h"

// Contract of the family: c = activation(a @ w + bias) (+ residual), c: f32[m, n] or bf16[m, n].
//
// op gemm_f32:   a f32[m, k],  w f32  packed [n/64][k][64]       arithmetic f32
// op gemm_q8s8:  a q8[m, k],   w s8   packed [n/64][k/4][64][4]  arithmetic s8
// op gemm_bf16:  a bf16[m, k], w bf16 packed [n/64][k/2][64][2]  arithmetic bf16_fma, bf16_dp, bf16_tile
//
// n is padded with zero columns to 64, k with zero rows to 4 (s8) or 2 (bf16). The reduction over k runs
// in order with one accumulator an output and is never split, so bits depend on neither m nor the
// partition. Blocking over k is allowed where partial sums are stored and reloaded exactly.
// Arithmetic f32: acc = fma(a, w, acc), k ascending from 0, acc starting at +0; then acc + bias.
// Arithmetic s8:  sum = exact integer sum of a*w, minus a_zero[row] * w_colsum[col] (int32);
//                 c = fma(float(sum), a_scale[row] * w_scale[col], bias) (bias 0 when absent).
// Then the activation, then + residual, then, where c_bf16 is given, the rounding to bf16 (to nearest, ties
// to even, as simd/vec.h has it).
namespace encast {

constexpr int kPanel = 64;  // columns of a packed weight panel

// Inputs that stand side by side in a panel, as one dot-product instruction takes them of an output; k is
// padded to whole groups.
constexpr int64_t panel_group(DType weight) { return 4 / static_cast<int64_t>(element_bytes(weight)); }

struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;            // f32, bf16 or u8; readable up to k rounded up to 4 (u8), 2 (bf16);
  int64_t a_stride = 0;               //   what lies there is finite. Strides are in elements.
  const float* a_scale = nullptr;     // [m], q8 only
  const int32_t* a_zero = nullptr;    // [m], q8 only
  const void* w = nullptr;            // packed, 64-byte aligned
  const float* w_scale = nullptr;     // [n rounded up to 64], s8 only
  const int32_t* w_colsum = nullptr;  // [n rounded up to 64], s8 only: sum over k of w
  const float* bias = nullptr;        // [n rounded up to 64] or null
  const float* residual = nullptr;    // [m, n] or null; never the memory of c
  int64_t residual_stride = 0;
  float* c = nullptr;  // never written beyond n columns
  int64_t c_stride = 0;
  // Instead of c, which is null then: bf16 rows of c_stride, columns from n to the next multiple of 64 set to
  // 0.
  uint16_t* c_bf16 = nullptr;
  Activation activation = Activation::none;
  bool exact = false;  // activations by libm in double instead of polynomials
  // Activations in their coarse form (simd/activation.h), where they have one and `exact` is false.
  bool coarse = false;
  // What the calling thread reads first in its next product: that many panels one after the other, of so many
  // bytes each. As many as a kernel finds useful (the vector kernels: the first) are prefetched while the
  // last ones are multiplied: a hint without effect on results; null when nothing follows.
  const void* next_w = nullptr;
  int64_t next_w_bytes = 0, next_w_panels = 1;
};

// Computes rows [m_begin, m_end) and panels [panel_begin, panel_end); panel p holds columns 64p to 64p+63.
// Different ranges may run at the same time in different threads.
using GemmFn = void (*)(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                        int64_t panel_end);

}  // namespace encast
