#include "cpu/peak_loop.h"

namespace encast {
namespace {

alignas(32) constexpr float kOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};

#define DOT(i) "%{vex%} vpdpbusd %%ymm14,%%ymm15,%%ymm" #i "\n"

}  // namespace

ENCAST_PEAK_LOOP(peak_int8_avxvnni, ENCAST_PEAK_BEGIN_YMM, ENCAST_PEAK_12(DOT), ENCAST_PEAK_END)

}  // namespace encast
