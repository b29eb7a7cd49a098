#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

namespace encast {
namespace {

// u8 times s8 in exact integers without vpdpbusd. vpmaddubsw would saturate: 255 * 127 * 2 does not fit into
// its 16 bits. So even and odd k get a phase each, in which both operands are widened to 16 bits in place and
// vpmaddwd adds two products of 16 bits into 32, exactly.
//
//   bytes of a 32-bit lane    | k0 | k1 | k2 | k3 |
//   phase 0                   |   k0    |   k2    |     row: and 0x00ff        columns: shift left, then
//   right phase 1                   |   k1    |   k3    |     row: shift right       columns: shift right
//   (signed)
//
// A tile goes through the panel four times, so rows are widened once, before.
struct DotQ8 : DotQ8Base<Shape6x16Wide> {
  static constexpr int kPhases = 2;
  static constexpr bool kWideRows = true;
  ENCAST_SIMD void widen(const uint8_t* p, int64_t groups, uint8_t* to) {
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4) {
      // Groups as 64-bit lanes: k0 and k2 in the lower half, k1 and k3 in the upper one.
      const __m256i group = _mm256_cvtepu32_epi64(load_as<__m128i>(p + 4 * g));
      const __m256i even = _mm256_and_si256(group, _mm256_set1_epi64x(0x00ff00ff));
      const __m256i odd =
          _mm256_and_si256(_mm256_slli_epi64(group, 24), _mm256_set1_epi64x(0x00ff00ff00000000));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + 8 * g), _mm256_or_si256(even, odd));
    }
    for (; g < groups; ++g) {
      const uint64_t group = load_as<uint32_t>(p + 4 * g);
      const uint64_t wide = (group & 0x00ff00ff) | (group << 24 & 0x00ff00ff00000000);
      __builtin_memcpy(to + 8 * g, &wide, sizeof wide);
    }
  }
  template <int P>
  ENCAST_SIMD __m256i row(const uint8_t* p) {
    return _mm256_set1_epi32(load_as<int32_t>(p + 4 * P));
  }
  template <int P>
  ENCAST_SIMD I32x16 columns(const uint8_t* p) {
    const I32x16 groups = load_i32(reinterpret_cast<const int32_t*>(p));
    return {widen<P>(groups.lo), widen<P>(groups.hi)};
  }
  ENCAST_SIMD I32x16 add(I32x16 sum, __m256i row, I32x16 columns) {
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(row, columns.lo));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(row, columns.hi));
    // Else the compiler adds the phases' products first, and runs out of registers for them.
    asm("" : "+x"(sum.lo), "+x"(sum.hi));
    return sum;
  }

 private:
  template <int P>
  ENCAST_SIMD __m256i widen(__m256i groups) {
    return _mm256_srai_epi16(P == 0 ? _mm256_slli_epi16(groups, 8) : groups, 8);
  }
};

}  // namespace

void gemm_f32_f32_f32_6x16_avx2(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                int64_t panel_end) {
  compute<DotTiles<DotF32<Shape6x16>>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_bf16_bf16_f32_6x16_avx2(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute<DotTiles<DotBF16<Shape6x16Wide>>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_q8_s8_s32_6x16_avx2(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                              int64_t panel_end) {
  compute<DotTiles<DotQ8>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
