#pragma once
#include "base/activation.h"
#include "simd/math.h"

// Activations over sixteen lanes, as transformers defines them:
//
//   gelu       x Phi(x) = x/2 (1 + erf(x / sqrt 2))
//   gelu_tanh  x/2 (1 + tanh(z)), z = sqrt(2/pi) (x + 0.044715 x^3), which is x / (1 + e^-2z)
//   silu       x / (1 + e^-x)
//   relu       max(x, 0)
//   tanh
//
// At -infinity gelu, gelu_tanh and silu are -0, their limit (the formulas taken literally give NaN).
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

ENCAST_SIMD F32x16 gelu(F32x16 x) {
  // Below the range of phi_minus_half the sum is exactly 0, above it exactly 1; the outer bound keeps
  // -infinity from meeting that 0.
  return max(set1(-0x1.0p+10f), x) * (set1(0.5f) + phi_minus_half(x));
}

ENCAST_SIMD F32x16 gelu_tanh(F32x16 x) {
  constexpr float kLinear = -1.5957691216057308f;  // -2 sqrt(2/pi)
  constexpr float kCubic = kLinear * 0.044715f;
  x = max(set1(-0x1.0p+10f), x);
  const F32x16 minus_2z = x * fma(x * x, set1(kCubic), set1(kLinear));
  return x / (set1(1.0f) + exp(minus_2z));
}

ENCAST_SIMD F32x16 silu(F32x16 x) {
  x = max(set1(-0x1.0p+10f), x);
  return x / (set1(1.0f) + exp(set1(0.0f) - x));
}

ENCAST_SIMD F32x16 relu(F32x16 x) { return max(set1(0.0f), x); }

template <Activation kind>
ENCAST_SIMD F32x16 activate(F32x16 x) {
  if constexpr (kind == Activation::gelu) return gelu(x);
  if constexpr (kind == Activation::gelu_tanh) return gelu_tanh(x);
  if constexpr (kind == Activation::relu) return relu(x);
  if constexpr (kind == Activation::silu) return silu(x);
  if constexpr (kind == Activation::tanh) return tanh(x);
  return x;
}

static inline double gelu_lane(double x) {
  x = x < -1024.0 ? -1024.0 : x;
  return 0.5 * x * __builtin_erfc(x * -0.70710678118654752440);
}
static inline double gelu_tanh_lane(double x) {
  x = x < -1024.0 ? -1024.0 : x;
  return x / (1.0 + __builtin_exp(-1.59576912160573071176 * x * (1.0 + 0.044715 * x * x)));
}
static inline double silu_lane(double x) {
  x = x < -1024.0 ? -1024.0 : x;
  return x / (1.0 + __builtin_exp(-x));
}
static inline double tanh_lane(double x) { return __builtin_tanh(x); }

// x[i] = kind(x[i]) for n vectors: one choice for all of them, so that their polynomials overlap.
template <int n>
ENCAST_SIMD void apply(Activation kind, bool exact, F32x16 (&x)[n]) {
  double (*lane)(double) = nullptr;
  switch (kind) {
    case Activation::none:
      return;
    case Activation::relu:
#pragma GCC unroll 64
      for (int i = 0; i < n; ++i) x[i] = relu(x[i]);
      return;
#define ENCAST_CASE(name)                                                   \
  case Activation::name:                                                    \
    if (exact) {                                                            \
      lane = name##_lane;                                                   \
      break;                                                                \
    }                                                                       \
    _Pragma("GCC unroll 64") for (int i = 0; i < n; ++i) x[i] = name(x[i]); \
    return;
      ENCAST_CASE(gelu)
      ENCAST_CASE(gelu_tanh)
      ENCAST_CASE(silu)
      ENCAST_CASE(tanh)
#undef ENCAST_CASE
  }
#pragma GCC unroll 64
  for (int i = 0; i < n; ++i) x[i] = map_exact(x[i], lane);
}

ENCAST_SIMD F32x16 apply(Activation kind, bool exact, F32x16 x) {
  F32x16 one[1] = {x};
  apply(kind, exact, one);
  return one[0];
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
