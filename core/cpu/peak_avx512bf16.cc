#include "cpu/peak_loop.h"

namespace encast {
namespace {

// The upper half of a 1.0f is a bf16 one, the lower half a zero.
alignas(64) constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

#define DOT(i) "vdpbf16ps %%zmm30,%%zmm31,%%zmm" #i "\n"

}  // namespace

ENCAST_PEAK_LOOP_512(peak_bf16_avx512bf16, ENCAST_PEAK_BEGIN_ZMM, ENCAST_PEAK_24(DOT), ENCAST_PEAK_END)

}  // namespace encast
