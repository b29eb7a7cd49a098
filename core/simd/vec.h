#pragma once
#include <cstdint>

// Sixteen virtual lanes: F32x16, I32x16 and Mask16, with the same bits on every ISA level.
//
// An algorithm is written once over these types in a header NAME_impl.h; one tiny source a level includes
// it. The level follows from the flags of that source; ENCAST_SIMD_SCALAR asks for the scalar one whatever
// the flags are. An F32x16 is one zmm register (avx512), two ymm registers (avx2) or float[16] (scalar).
//
// Everything stands in an inline namespace named after the level and has internal linkage, so that no
// symbol of one level can be linked into another. Nothing here may include a header of the standard
// library that defines inline functions: their weak symbols would carry the level's instructions.
//
// Operations (F: F32x16, I: I32x16, M: Mask16; n: number of lanes, 0 to 16):
//
//   F load(const float*)                        no alignment is needed
//   F load_partial(const float*, n, fill = 0)   lanes from n on hold `fill`; memory behind n is not touched
//   void store(float*, F)
//   void store_partial(float*, n, F)
//   I load_i32(const int32_t*)
//   void store_i32(int32_t*, I)
//   I load_u8(const uint8_t*)                   16 bytes, zero-extended
//   void store_u8(uint8_t*, I)                  16 bytes, clamped to 0 ... 255
//   I load_u16(const uint16_t*)
//   void store_u16(uint16_t*, I)                lanes must be 0 to 65535
//   F load_bf16(const uint16_t*)                exact
//   I to_bf16(F)                                to nearest, ties to even, subnormals kept, NaN stays NaN
//   void store_bf16(uint16_t*, F)               the same
//   F set1(float), I set1(int32_t)
//   + - * /                                     IEEE, rounded once; I wraps around and has & | ^, no /
//   F fma(a, b, c)                              a * b + c, rounded once
//   F fnma(a, b, c)                             c - a * b, rounded once
//   F max(a, b), F min(a, b)                    a > b ? a : b and a < b ? a : b: b if one is NaN or both 0
//   I max(a, b), I min(a, b)                    signed
//   F abs(a), F sqrt(a)
//   F round(a)                                  to an integral value, ties to even
//   I to_i32(F)                                 to nearest, ties to even; INT32_MIN if NaN or out of range
//   F to_f32(I)                                 to nearest, ties to even
//   I bits(F), F from_bits(I)                   reinterpretation
//   I shift_left<s>(I), I shift_right<s>(I)     logical
//   M less(a, b), M less_equal(a, b)            false when either is NaN
//   M is_nan(a), M first_lanes(n)
//   F select(m, a, b), I select(m, a, b)        a where m is set, else b
//   F lookup(const float table[16], I)          table[i & 15] for each lane i; the table is 64-byte aligned
//   F times_power_of_2(a, n)                    a * 2^n rounded once; n integral, |n| <= 252, |a| in [0.5, 2)
//   float reduce_add(F), float reduce_max(F), int32_t reduce_max(I)
//
// Reductions fold the upper half onto the lower one: lanes i and i+8, then i+4, i+2, i+1, the lower lane
// as the left operand. An operation that makes a NaN makes one on every level; its sign and payload are
// not part of the contract. MXCSR is as the ABI sets it up: to nearest, subnormals kept.

#ifdef ENCAST_SANITIZED
// A function each: inlined, with a check at every access to a lane, some callers take minutes to compile.
#define ENCAST_SIMD static inline
#define ENCAST_SIMD_BODY
#else
#define ENCAST_SIMD static inline __attribute__((always_inline))
#define ENCAST_SIMD_BODY __attribute__((always_inline))
#endif
// For tiles that come in dozens of shapes: a function each, or the caller's size costs minutes of compile
// time under the sanitizers.
#define ENCAST_SIMD_TILE static __attribute__((noinline))

#if defined(ENCAST_SIMD_SCALAR)
#include "simd/vec_scalar.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd/vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd/vec_avx2.h"
#else
#include "simd/vec_scalar.h"
#endif

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

ENCAST_SIMD F32x16 load_bf16(const uint16_t* p) { return from_bits(shift_left<16>(load_u16(p))); }

// The rounding is integer arithmetic on every level: vcvtneps2bf16 would flush subnormals.
ENCAST_SIMD I32x16 to_bf16(F32x16 a) {
  const I32x16 u = bits(a);
  const I32x16 rounded = u + (set1(0x7fff) + (shift_right<16>(u) & set1(1)));
  const I32x16 quiet_nan = u | set1(0x400000);
  return shift_right<16>(select(is_nan(a), quiet_nan, rounded));
}
ENCAST_SIMD void store_bf16(uint16_t* p, F32x16 a) { store_u16(p, to_bf16(a)); }

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
