#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

namespace encast {
namespace {

// vpdpbusd adds four products of u8 by s8 to an int32 and never saturates; here in its VEX form on ymm.
struct DotQ8 : DotQ8Base<Shape6x16> {
  static constexpr int kPhases = 1;
  template <int P>
  ENCAST_SIMD __m256i row(const uint8_t* p) {
    return _mm256_set1_epi32(load_as<int32_t>(p));
  }
  template <int P>
  ENCAST_SIMD I32x16 columns(const uint8_t* p) {
    return load_i32(reinterpret_cast<const int32_t*>(p));
  }
  ENCAST_SIMD I32x16 add(I32x16 sum, __m256i row, I32x16 columns) {
    return {_mm256_dpbusd_avx_epi32(sum.lo, row, columns.lo),
            _mm256_dpbusd_avx_epi32(sum.hi, row, columns.hi)};
  }
};

}  // namespace

void gemm_q8_s8_s32_6x16_avxvnni(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                 int64_t panel_end) {
  compute<DotTiles<DotQ8>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
