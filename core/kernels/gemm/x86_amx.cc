#include <immintrin.h>

#include "kernels/gemm/amx.h"

namespace encast {
namespace {

struct Instructions {
  void configure(const TileConfig& config) { _tile_loadconfig(&config); }
  void release() { _tile_release(); }
  template <int t>
  [[gnu::always_inline]] void zero() {
    _tile_zero(t);
  }
  template <int t>
  [[gnu::always_inline]] void load(const void* p, int64_t stride) {
    _tile_loadd(t, p, stride);
  }
  template <int t>
  [[gnu::always_inline]] void store(void* p, int64_t stride) {
    _tile_stored(t, p, stride);
  }
  template <class Dot, int c, int a, int b>
  [[gnu::always_inline]] void multiply() {
    if constexpr (Dot::kQuantized) {
      _tile_dpbusd(c, a, b);
    } else {
      _tile_dpbf16ps(c, a, b);
    }
  }
};

}  // namespace

void gemm_q8_s8_s32_32x32_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                              int64_t panel_end) {
  compute<AmxTiles<AmxQ8, Instructions>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_bf16_bf16_f32_32x32_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute<AmxTiles<AmxBF16, Instructions>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
