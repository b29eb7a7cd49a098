#include "cpu/peak_loop.h"

namespace encast {
namespace {

alignas(64) constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

#define DOT(i) "vpdpbusd %%zmm30,%%zmm31,%%zmm" #i "\n"

}  // namespace

ENCAST_PEAK_LOOP_512(peak_int8_avx512vnni, ENCAST_PEAK_BEGIN_ZMM, ENCAST_PEAK_24(DOT), ENCAST_PEAK_END)

}  // namespace encast
