#pragma once
#include "simd/vec.h"

// exp, erf, tanh over sixteen lanes: polynomials of fused multiply-adds, no tables, no branches.
// Measured errors stand in README.md; test.cc holds them. NaN gives NaN, infinities their limits.
//
// The coefficients are minimax fits: least squares reweighted after Lawson, in double, then rounded to f32
// and measured again in f32 arithmetic.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// c[0] + x * (c[1] + x * (c[2] + ...)).
template <int n>
ENCAST_SIMD F32x16 horner(F32x16 x, const float (&c)[n]) {
  F32x16 sum = set1(c[n - 1]);
#pragma GCC unroll 16
  for (int i = n - 2; i >= 0; --i) sum = fma(sum, x, set1(c[i]));
  return sum;
}

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and e^r = 1 + r + r^2 q(r).
// ln 2 is taken off in two parts, the first of 9 bits, so that n times it is exact.
// Subnormal results are rounded once, like all others.
ENCAST_SIMD F32x16 exp(F32x16 x) {
  constexpr float kQ[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.1239e2p-7f, 0x1.6a2434p-10f};
  // e^89 overflows and e^-104 is below half of the smallest subnormal. The bound goes first: NaN passes.
  x = min(set1(89.0f), max(set1(-104.0f), x));
  const F32x16 n = round(x * set1(0x1.715476p+0f));
  const F32x16 r = fnma(n, set1(-0x1.bd0106p-13f), fnma(n, set1(0x1.63p-1f), x));
  const F32x16 value = fma(r * r, horner(r, kQ), r) + set1(1.0f);
  return times_power_of_2(value, n);
}

// Phi(x) - 1/2 = erf(x / sqrt 2) / 2, odd: x times a polynomial in x^2 - kCentre. Centring keeps the terms
// small, so that 15 coefficients lose nothing to cancellation over the whole range. Beyond
// kPhiRange, where the polynomial meets 1/2 to the last bit, the value stays exactly +-1/2.
ENCAST_SIMD F32x16 phi_minus_half(F32x16 x) {
  constexpr float kPhiRange = 0x1.59072p+2f;
  constexpr float kCentre = 14.58f;
  constexpr float kP[] = {0x1.0c240ap-3f,  -0x1.25a4f8p-8f,  0x1.de7748p-13f, -0x1.a87c2ep-17f,
                          0x1.7d9ef4p-21f, -0x1.4f693cp-25f, 0x1.188f56p-29f, -0x1.b90766p-34f,
                          0x1.50f71cp-38f, -0x1.f0201ap-43f, 0x1.1d0a2ep-47f, -0x1.e3a9b8p-53f,
                          0x1.aac146p-57f, -0x1.ade0d2p-61f, 0x1.3d1878p-66f};
  x = min(set1(kPhiRange), max(set1(-kPhiRange), x));
  return x * horner(fma(x, x, set1(-kCentre)), kP);
}

ENCAST_SIMD F32x16 erf(F32x16 x) {
  const F32x16 half = phi_minus_half(x * set1(0x1.6a09e6p+0f));
  return half + half;
}

// Below 0.625 an odd polynomial, above 1 - 2 / (e^2|x| + 1).
ENCAST_SIMD F32x16 tanh(F32x16 x) {
  constexpr float kP[] = {-0x1.555534p-2f, 0x1.110768p-3f, -0x1.b84448p-5f, 0x1.5256d6p-6f, -0x1.76ac18p-8f};
  const F32x16 magnitude = abs(x);
  const F32x16 t = x * x;
  const F32x16 small = fma(magnitude * t, horner(t, kP), magnitude);
  const F32x16 large = set1(1.0f) - set1(2.0f) / (exp(magnitude + magnitude) + set1(1.0f));
  const F32x16 positive = select(less(magnitude, set1(0.625f)), small, large);
  return from_bits(bits(positive) | (bits(x) & set1(INT32_MIN)));
}

// The exact forms go lane by lane through the C library in double, then round once.
static inline __attribute__((noinline)) void map_lanes(float* lanes, double (*function)(double)) {
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(function(static_cast<double>(lanes[i])));
}
ENCAST_SIMD F32x16 map_exact(F32x16 x, double (*function)(double)) {
  float lanes[16];
  store(lanes, x);
  map_lanes(lanes, function);
  return load(lanes);
}

static inline double exp_lane(double x) { return __builtin_exp(x); }
ENCAST_SIMD F32x16 exp_exact(F32x16 x) { return map_exact(x, exp_lane); }

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
