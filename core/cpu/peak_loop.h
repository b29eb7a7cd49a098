#pragma once
#include <cstdint>

// The loops of the peak probes. Assembly, because a compiler would find out that nobody reads the sums.
// Twelve or more independent sums keep every multiplier busy: a product takes four or five cycles, and two
// start in each. The operands are ones, neither zeros nor denormals, which a processor may treat in a way of
// their own.

#define ENCAST_PEAK_6(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define ENCAST_PEAK_12(X) ENCAST_PEAK_6(X) X(6) X(7) X(8) X(9) X(10) X(11)
#define ENCAST_PEAK_24(X) \
  ENCAST_PEAK_12(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)

// Defines the probe `name`: `begin` once, then `body` `passes` times, then `end`, on the vector registers 0
// to 15.
#define ENCAST_PEAK_LOOP(name, begin, body, end)                                                       \
  void name(int64_t passes) {                                                                          \
    __asm__ volatile(begin ".p2align 5\n1:\n" body "dec %0\n jnz 1b\n" end                             \
                     : "+r"(passes)                                                                    \
                     : "r"(kOnes)                                                                      \
                     : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", \
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");          \
  }

// The same on all thirty-two registers of AVX-512.
#define ENCAST_PEAK_LOOP_512(name, begin, body, end)                                                    \
  void name(int64_t passes) {                                                                           \
    __asm__ volatile(begin ".p2align 5\n1:\n" body "dec %0\n jnz 1b\n" end                              \
                     : "+r"(passes)                                                                     \
                     : "r"(kOnes)                                                                       \
                     : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",  \
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16",   \
                       "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", \
                       "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");                           \
  }

// Sums begin at zero: what earlier code left in a register may be denormal as a float. Upper halves in use
// would slow the SSE code that follows down.
#define ENCAST_PEAK_ZERO_XMM(i) "pxor %%xmm" #i ",%%xmm" #i "\n"
#define ENCAST_PEAK_ZERO_YMM(i) "vpxor %%ymm" #i ",%%ymm" #i ",%%ymm" #i "\n"
#define ENCAST_PEAK_ZERO_ZMM(i) "vpxord %%zmm" #i ",%%zmm" #i ",%%zmm" #i "\n"
#define ENCAST_PEAK_BEGIN_XMM ENCAST_PEAK_12(ENCAST_PEAK_ZERO_XMM) "movaps (%1),%%xmm15\n"
#define ENCAST_PEAK_BEGIN_YMM \
  ENCAST_PEAK_12(ENCAST_PEAK_ZERO_YMM) "vmovaps (%1),%%ymm14\n vmovaps (%1),%%ymm15\n"
#define ENCAST_PEAK_BEGIN_ZMM \
  ENCAST_PEAK_24(ENCAST_PEAK_ZERO_ZMM) "vmovaps (%1),%%zmm30\n vmovaps (%1),%%zmm31\n"
#define ENCAST_PEAK_END "vzeroupper\n"
