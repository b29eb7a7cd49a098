#include "cpu/peak_loop.h"

namespace encast {
namespace {

alignas(32) constexpr float kOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};

#define FMA(i) "vfmadd231ps %%ymm14,%%ymm15,%%ymm" #i "\n"
// Four bytes of a lane reach a 32-bit sum exactly in two products and two additions of operands widened to 16
// bits. vpmaddubsw saturates; made exact by a sign trick it takes as many instructions.
#define MADD(i)                         \
  "vpmaddwd %%ymm15,%%ymm14,%%ymm12\n"  \
  "vpaddd %%ymm12,%%ymm" #i ",%%ymm" #i \
  "\n"                                  \
  "vpmaddwd %%ymm15,%%ymm14,%%ymm13\n"  \
  "vpaddd %%ymm13,%%ymm" #i ",%%ymm" #i "\n"

}  // namespace

ENCAST_PEAK_LOOP(peak_f32_avx2, ENCAST_PEAK_BEGIN_YMM, ENCAST_PEAK_12(FMA), ENCAST_PEAK_END)
ENCAST_PEAK_LOOP(peak_int8_avx2, ENCAST_PEAK_BEGIN_YMM, ENCAST_PEAK_6(MADD), ENCAST_PEAK_END)

}  // namespace encast
