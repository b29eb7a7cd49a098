#include "kernels/gemm/amx.h"

namespace encast {
namespace {

// In assembly, because GCC's intrinsics take the register's number as a token and no template parameter. No
// compiler uses tile registers of its own accord.
struct Instructions {
  void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  void release() { asm volatile("tilerelease"); }
  template <int t>
  [[gnu::always_inline]] void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(t));
  }
  template <int t>
  [[gnu::always_inline]] void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  [[gnu::always_inline]] void stream(const void* p, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  [[gnu::always_inline]] void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }
  // c += a * b; AT&T order: b first.
  template <class Dot, int c, int a, int b>
  [[gnu::always_inline]] void multiply() {
    if constexpr (Dot::kQuantized) {
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    } else {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
  }
};

}  // namespace

void gemm_q8_s8_s32_32x32_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                              int64_t panel_end) {
  compute_amx<AmxQ8, Instructions>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_bf16_bf16_f32_32x32_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute_amx<AmxBF16, Instructions>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
