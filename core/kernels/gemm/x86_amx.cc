#include "kernels/gemm/amx.h"
#include "simd/amx_instructions.h"

namespace encast {

void gemm_q8_s8_s32_32x32_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                              int64_t panel_end) {
  compute_amx<AmxQ8, AmxInstructions>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_bf16_bf16_f32_32x32_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute_amx<AmxBF16, AmxInstructions>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
