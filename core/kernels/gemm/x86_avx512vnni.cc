#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

namespace encast {
namespace {

// vpdpbusd adds four products of u8 by s8 to an int32 and never saturates.
struct DotQ8 : DotQ8Base<Shape6x64> {
  static constexpr int kPhases = 1;
  template <int P>
  ENCAST_SIMD __m512i row(const uint8_t* p) {
    return _mm512_set1_epi32(load_as<int32_t>(p));
  }
  template <int P>
  ENCAST_SIMD __m512i columns(const uint8_t* p) {
    return _mm512_loadu_si512(p);
  }
  ENCAST_SIMD I32x16 add(I32x16 sum, __m512i row, __m512i columns) {
    return {_mm512_dpbusd_epi32(sum.v, row, columns)};
  }
};

}  // namespace

void gemm_q8_s8_s32_6x64_avx512vnni(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                    int64_t panel_end) {
  compute<DotTiles<DotQ8>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
