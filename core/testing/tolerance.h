#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

// Bounds for float results, derived instead of guessed.
namespace encast::testing {

constexpr double kEpsilonF32 = 0x1p-24;  // unit roundoff of binary32
constexpr double kEpsilonBF16 = 0x1p-8;  // and of bfloat16

// n * u / (1 - n * u): relative error of n chained roundings (Higham, Accuracy and Stability of Numerical
// Algorithms, lemma 3.1).
constexpr double gamma_bound(int64_t n, double unit_roundoff = kEpsilonF32) {
  const double nu = static_cast<double>(n) * unit_roundoff;
  return nu / (1.0 - nu);
}

// Largest error of a dot product of k terms computed by fused multiply-adds in any order, given
// sum |a_i * b_i| in exact arithmetic (same source, section 3.1).
constexpr double dot_bound(int64_t k, double sum_abs_products, double unit_roundoff = kEpsilonF32) {
  return gamma_bound(k, unit_roundoff) * sum_abs_products + std::numeric_limits<float>::denorm_min();
}

// Floats between a and b: 0 when equal, 1 for neighbours; -0 and 0 are the same. Largest when either is NaN.
inline int64_t ulps_between(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<int64_t>::max();
  const auto ordered = [](float x) {
    const int32_t bits = std::bit_cast<int32_t>(x);
    return bits < 0 ? -static_cast<int64_t>(bits & 0x7fffffff) : static_cast<int64_t>(bits);
  };
  return std::llabs(ordered(a) - ordered(b));
}

}  // namespace encast::testing
