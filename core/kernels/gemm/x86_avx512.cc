#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

namespace encast {
namespace {

// As in x86_avx2.cc: even and odd k in a phase each, because vpmaddubsw would saturate.
struct DotQ8 : DotQ8Base<Shape6x64> {
  static constexpr int kPhases = 2;
  template <int P>
  ENCAST_SIMD __m512i row(const uint8_t* p) {
    const __m512i group = _mm512_set1_epi32(load_as<int32_t>(p));
    return P == 0 ? _mm512_and_si512(group, _mm512_set1_epi16(0xff)) : _mm512_srli_epi16(group, 8);
  }
  template <int P>
  ENCAST_SIMD __m512i columns(const uint8_t* p) {
    const __m512i groups = _mm512_loadu_si512(p);
    return _mm512_srai_epi16(P == 0 ? _mm512_slli_epi16(groups, 8) : groups, 8);
  }
  ENCAST_SIMD I32x16 add(I32x16 sum, __m512i row, __m512i columns) {
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(row, columns));
    asm("" : "+v"(sum.v));
    return sum;
  }
};

}  // namespace

void gemm_f32_f32_f32_6x64_avx512(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute<DotTiles<DotF32<Shape6x64>>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_bf16_bf16_f32_6x64_avx512(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                    int64_t panel_end) {
  compute<DotTiles<DotBF16<Shape6x64>>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_q8_s8_s32_6x64_avx512(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                int64_t panel_end) {
  compute<DotTiles<DotQ8>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
