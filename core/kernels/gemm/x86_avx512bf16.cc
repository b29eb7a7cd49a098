#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

namespace encast {
namespace {

// Arithmetic bf16_dp: vdpbf16ps adds two products of bf16 to an f32. It rounds in between in its own way and
// flushes subnormals, so no other instruction gives its bits.
struct DotPairs {
  using Shape = Shape6x64;
  using Sum = F32x16;
  static constexpr int kGroup = 2, kPhases = 1;
  static constexpr bool kQuantized = false, kWideRows = false;

  ENCAST_SIMD Sum zero() { return set1(0.0f); }
  template <int P>
  ENCAST_SIMD __m512i row(const uint8_t* p) {
    __m512i group = _mm512_set1_epi32(load_as<int32_t>(p));
    asm("" : "+v"(group));  // clang 16 crashes where it sees a broadcast become bf16
    return group;
  }
  template <int P>
  ENCAST_SIMD __m512i columns(const uint8_t* p) {
    return _mm512_loadu_si512(p);
  }
  ENCAST_SIMD Sum add(Sum sum, __m512i row, __m512i columns) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)row, (__m512bh)columns)};
  }
};

}  // namespace

void gemm_bf16_bf16_f32_6x64_avx512bf16(const GemmArgs& args, int64_t m_begin, int64_t m_end,
                                        int64_t panel_begin, int64_t panel_end) {
  compute<DotTiles<DotPairs>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
