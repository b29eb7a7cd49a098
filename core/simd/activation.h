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
//
// gelu and gelu_tanh have a coarse form too, within 1e-4 of the true value, for outputs that are rounded to
// q8 or bf16 next: a q8 step of a row that reaches 2.5 is a hundred times as large.
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

// max(x, 0) - activation(x), which is an even bump: |x| Phi(-|x|) for gelu. In sixteenths of a range: lanes
// of c[0] + |x| (c[1] + |x| c[2]) belong to |x| around 0, 1, 2 ... times 1 / kBumpSteps. The minimax
// parabolas were fitted as in math.h; the first goes through 0, and the last is 0 where the bump has fallen
// below 1e-4.
struct alignas(64) Bump {
  float c[3][16];
};
constexpr float kBumpSteps = 3.5f;
constexpr Bump kGeluBump = {{
    {0.0f, 0x1.19574cp-10f, 0x1.1a80a4p-6f, 0x1.2a0144p-4f, 0x1.64e2cep-3f, 0x1.2f31e6p-2f, 0x1.92c766p-2f,
     0x1.b8b5e8p-2f, 0x1.98a8eap-2f, 0x1.482d7cp-2f, 0x1.ce5224p-3f, 0x1.205ep-3f, 0x1.40cc1cp-4f,
     0x1.3ff3fp-5f, 0x1.1f48e2p-6f, 0.0f},
    {0x1.ffdd4ep-2f, 0x1.f40d8p-2f, 0x1.a94894p-2f, 0x1.0b0ap-2f, 0x1.d5161cp-5f, -0x1.1185dap-3f,
     -0x1.08f2a4p-2f, -0x1.32d748p-2f, -0x1.1573f4p-2f, -0x1.a69998p-3f, -0x1.176dp-3f, -0x1.463f34p-4f,
     -0x1.53c3bp-5f, -0x1.3dc3c6p-6f, -0x1.0c2a98p-7f, 0.0f},
    {-0x1.964978p-2f, -0x1.76be96p-2f, -0x1.21a8eap-2f, -0x1.6658a2p-3f, -0x1.2a2554p-4f, 0x1.066f42p-9f,
     0x1.5a994cp-5f, 0x1.b72118p-5f, 0x1.813c5p-5f, 0x1.1474b8p-5f, 0x1.5592dp-6f, 0x1.740f5cp-7f,
     0x1.69f0b8p-8f, 0x1.3cf0ccp-9f, 0x1.f63e94p-11f, 0.0f},
}};
constexpr Bump kGeluTanhBump = {{
    {0.0f, 0x1.1a7b94p-10f, 0x1.1b1292p-6f, 0x1.29bcaap-4f, 0x1.639494p-3f, 0x1.2dc3cp-2f, 0x1.91bc0cp-2f,
     0x1.b9f67p-2f, 0x1.9d53dp-2f, 0x1.4e1bdap-2f, 0x1.d60a78p-3f, 0x1.200d5cp-3f, 0x1.32ba7ep-4f,
     0x1.1a4a8ep-5f, 0x1.be2024p-7f, 0.0f},
    {0x1.ffdd22p-2f, 0x1.f400d6p-2f, 0x1.a9150cp-2f, 0x1.0b1a38p-2f, 0x1.dede34p-5f, -0x1.0c9f9cp-3f,
     -0x1.06f4dcp-2f, -0x1.33513ep-2f, -0x1.1924eep-2f, -0x1.b01d94p-3f, -0x1.1dec1cp-3f, -0x1.4886a6p-4f,
     -0x1.47e32p-5f, -0x1.1b345ap-6f, -0x1.a4dfe2p-8f, 0.0f},
    {-0x1.9646aep-2f, -0x1.769998p-2f, -0x1.215458p-2f, -0x1.660682p-3f, -0x1.2bcd5p-4f, 0x1.26da4ap-10f,
     0x1.547ea8p-5f, 0x1.b654aep-5f, 0x1.867e12p-5f, 0x1.1b8332p-5f, 0x1.5f490ep-6f, 0x1.7931f4p-7f,
     0x1.601b98p-8f, 0x1.1d040ap-9f, 0x1.8dec24p-11f, 0.0f},
}};

// look_up(i, pieces): from c[i].
template <class LookUp>
ENCAST_SIMD F32x16 minus_bump(F32x16 x, LookUp look_up) {
  const F32x16 magnitude = min(abs(x), set1(15 / kBumpSteps));
  // Adding 2^23 rounds to an integer, which the lower bits then hold.
  const I32x16 piece = bits(fma(magnitude, set1(kBumpSteps), set1(0x1p23f)));
  const F32x16 slope = fma(magnitude, look_up(2, piece), look_up(1, piece));
  return max(set1(0.0f), x) - fma(magnitude, slope, look_up(0, piece));
}
ENCAST_SIMD F32x16 minus_bump(const Bump& bump, F32x16 x) {
  return minus_bump(
      x, [&](int i, I32x16 piece) __attribute__((always_inline)) { return lookup(bump.c[i], piece); });
}
// Of an activation's coarse form; null where there is none.
ENCAST_SIMD const Bump* bump_of(Activation kind) {
  return kind == Activation::gelu ? &kGeluBump : kind == Activation::gelu_tanh ? &kGeluTanhBump : nullptr;
}

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
