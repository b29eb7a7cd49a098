#pragma once
#include "simd/amx.h"

namespace encast {
namespace {

// In assembly, because GCC's intrinsics take the register's number as a token and no template parameter. No
// compiler uses tile registers of its own accord.
struct AmxInstructions {
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
  template <TileProduct product, int c, int a, int b>
  [[gnu::always_inline]] void multiply() {
    if constexpr (product == TileProduct::u8s8) {
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    } else {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
  }
};

}  // namespace
}  // namespace encast
