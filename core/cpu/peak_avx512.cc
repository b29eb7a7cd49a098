#include "cpu/peak_loop.h"

namespace encast {
namespace {

alignas(64) constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

#define FMA(i) "vfmadd231ps %%zmm30,%%zmm31,%%zmm" #i "\n"
// Without VNNI, as in peak_avx2.cc.
#define MADD(i)                         \
  "vpmaddwd %%zmm31,%%zmm30,%%zmm28\n"  \
  "vpaddd %%zmm28,%%zmm" #i ",%%zmm" #i \
  "\n"                                  \
  "vpmaddwd %%zmm31,%%zmm30,%%zmm29\n"  \
  "vpaddd %%zmm29,%%zmm" #i ",%%zmm" #i "\n"

}  // namespace

ENCAST_PEAK_LOOP_512(peak_f32_avx512, ENCAST_PEAK_BEGIN_ZMM, ENCAST_PEAK_24(FMA), ENCAST_PEAK_END)
ENCAST_PEAK_LOOP_512(peak_int8_avx512, ENCAST_PEAK_BEGIN_ZMM, ENCAST_PEAK_12(MADD), ENCAST_PEAK_END)

}  // namespace encast
