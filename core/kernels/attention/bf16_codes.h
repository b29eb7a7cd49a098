#pragma once
#include "simd/vec.h"

// Codes of class bf16_dp and bf16_tile by AVX-512 BF16. They are flushed where they are subnormal, as the
// products would.
namespace encast {
namespace {

struct Bf16Codes {
  ENCAST_SIMD I32x16 round_pair(F32x16 a, F32x16 b) { return {(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)}; }
  ENCAST_SIMD I32x16 interleave_pair(I32x16 codes) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return {_mm512_permutexvar_epi16(order, codes.v)};
  }
};

}  // namespace
}  // namespace encast
