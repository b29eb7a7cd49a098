#pragma once
#include "simd/activation.h"
#include "simd/probe.h"
#include "simd/transpose.h"

// The operations that test.cc compares between levels, by name.
#define ENCAST_PROBES(P)                                                                    \
  P(add, a + b)                                                                             \
  P(subtract, a - b)                                                                        \
  P(multiply, a* b)                                                                         \
  P(divide, a / b)                                                                          \
  P(fma, fma(a, b, c))                                                                      \
  P(fnma, fnma(a, b, c))                                                                    \
  P(max, max(a, b))                                                                         \
  P(min, min(a, b))                                                                         \
  P(abs, abs(a))                                                                            \
  P(sqrt, sqrt(a))                                                                          \
  P(round, round(a))                                                                        \
  P(to_i32, from_bits(to_i32(a)))                                                           \
  P(to_f32, to_f32(bits(a)))                                                                \
  P(add_i32, from_bits(bits(a) + bits(b)))                                                  \
  P(subtract_i32, from_bits(bits(a) - bits(b)))                                             \
  P(multiply_i32, from_bits(bits(a) * bits(b)))                                             \
  P(and_i32, from_bits(bits(a) & bits(b)))                                                  \
  P(or_i32, from_bits(bits(a) | bits(b)))                                                   \
  P(xor_i32, from_bits(bits(a) ^ bits(b)))                                                  \
  P(max_i32, from_bits(max(bits(a), bits(b))))                                              \
  P(min_i32, from_bits(min(bits(a), bits(b))))                                              \
  P(shift_left, from_bits(shift_left<5>(bits(a))))                                          \
  P(shift_right, from_bits(shift_right<5>(bits(a))))                                        \
  P(less, select(less(a, b), set1(1.0f), set1(0.0f)))                                       \
  P(less_equal, select(less_equal(a, b), set1(1.0f), set1(0.0f)))                           \
  P(is_nan, from_bits(select(is_nan(a), set1(1), set1(0))))                                 \
  P(to_bf16, from_bits(to_bf16(a)))                                                         \
  P(bf16_round_trip, round_trip(a))                                                         \
  P(times_power_of_2,                                                                       \
    times_power_of_2(mantissa(a), round(set1(250.0f) * min(abs(b), set1(1.0f)) * sign(b)))) \
  P(reduce_add, set1(reduce_add(a)))                                                        \
  P(reduce_max, set1(reduce_max(a)))                                                        \
  P(reduce_max_i32, from_bits(set1(reduce_max(bits(a)))))                                   \
  P(exp, exp(a))                                                                            \
  P(erf, erf(a))                                                                            \
  P(tanh, tanh(a))                                                                          \
  P(gelu, apply(Activation::gelu, false, a))                                                \
  P(gelu_tanh, apply(Activation::gelu_tanh, false, a))                                      \
  P(relu, apply(Activation::relu, false, a))                                                \
  P(silu, apply(Activation::silu, false, a))                                                \
  P(lookup, lookup(kGeluBump.c[1], bits(a)))                                                \
  P(gelu_coarse, minus_bump(*bump_of(Activation::gelu), a))                                 \
  P(gelu_tanh_coarse, minus_bump(*bump_of(Activation::gelu_tanh), a))                       \
  P(exp_exact, exp_exact(a))                                                                \
  P(gelu_exact, apply(Activation::gelu, true, a))                                           \
  P(gelu_tanh_exact, apply(Activation::gelu_tanh, true, a))                                 \
  P(relu_exact, apply(Activation::relu, true, a))                                           \
  P(silu_exact, apply(Activation::silu, true, a))                                           \
  P(tanh_exact, apply(Activation::tanh, true, a))

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

ENCAST_SIMD F32x16 round_trip(F32x16 a) {
  uint16_t halves[16];
  store_bf16(halves, a);
  return load_bf16(halves);
}
// In [1, 2), and +-1.
ENCAST_SIMD F32x16 mantissa(F32x16 a) { return from_bits((bits(a) & set1(0x7fffff)) | set1(0x3f800000)); }
ENCAST_SIMD F32x16 sign(F32x16 a) { return from_bits((bits(a) & set1(INT32_MIN)) | set1(0x3f800000)); }

// In a namespace of their own: their names are those of the operations.
namespace probes {
#define ENCAST_PROBE(name, expression)                                                                 \
  static void probe_##name(const float* pa, const float* pb, const float* pc, int64_t n, float* out) { \
    for (int64_t i = 0; i < n; i += 16) {                                                              \
      [[maybe_unused]] const F32x16 a = load(pa + i), b = load(pb + i), c = load(pc + i);              \
      store(out + i, expression);                                                                      \
    }                                                                                                  \
  }
ENCAST_PROBES(ENCAST_PROBE)
#undef ENCAST_PROBE
}  // namespace probes

static inline void probe_partial(const float* p, int64_t n, float fill, float* out16, float* out) {
  const F32x16 a = load_partial(p, n, fill);
  store(out16, a);
  store_partial(out, n, a + set1(1.0f));
}
static inline void probe_store_u8(const int32_t* lanes, uint8_t* out) { store_u8(out, load_i32(lanes)); }
static inline void probe_transpose(const float* in, float* out) {
  F32x16 rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = load(in + 16 * i);
  transpose(rows);
  for (int i = 0; i < 16; ++i) store(out + 16 * i, rows[i]);
}

static inline ProbeTable probe_table() {
#define ENCAST_PROBE(name, expression) {#name, probes::probe_##name},
  static const Probe table[] = {ENCAST_PROBES(ENCAST_PROBE)};
#undef ENCAST_PROBE
  return {table, static_cast<int>(sizeof table / sizeof table[0]), probe_partial, probe_store_u8,
          probe_transpose};
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
