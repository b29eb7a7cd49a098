#include "cpu/peak_loop.h"

// Baseline x86-64 has vectors of 16 bytes, and neither fused nor byte products.
namespace encast {
namespace {

alignas(16) constexpr float kOnes[4] = {1, 1, 1, 1};

#define MUL_ADD(i) "movaps %%xmm15,%%xmm14\n mulps %%xmm15,%%xmm14\n addps %%xmm14,%%xmm" #i "\n"

}  // namespace

ENCAST_PEAK_LOOP(peak_f32_scalar, ENCAST_PEAK_BEGIN_XMM, ENCAST_PEAK_12(MUL_ADD), "")

#undef MUL_ADD
#define MUL_ADD(i) "movdqa %%xmm15,%%xmm14\n pmaddwd %%xmm15,%%xmm14\n paddd %%xmm14,%%xmm" #i "\n"

ENCAST_PEAK_LOOP(peak_int8_scalar, ENCAST_PEAK_BEGIN_XMM, ENCAST_PEAK_12(MUL_ADD), "")

}  // namespace encast
