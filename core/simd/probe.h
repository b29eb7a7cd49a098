#pragma once
#include <cstdint>

// Doors into the lanes of every level, for test.cc alone: nothing else refers to them, so the linker leaves
// these objects out of the library's users.
namespace encast {

// out = operation(a, b, c) for n elements, n a multiple of 16. Integer results are handed over as their bits.
using ProbeFn = void (*)(const float* a, const float* b, const float* c, int64_t n, float* out);

struct Probe {
  const char* name;
  ProbeFn fn;
};

struct ProbeTable {
  const Probe* probes;
  int count;
  // out16 = load_partial(p, n, fill), and store_partial of it plus one to out.
  void (*partial)(const float* p, int64_t n, float fill, float* out16, float* out);
  void (*store_u8)(const int32_t* lanes, uint8_t* out);
  void (*transpose)(const float* in, float* out);  // 16x16
};

ProbeTable probe_table_scalar();
ProbeTable probe_table_avx2();
ProbeTable probe_table_avx512();

}  // namespace encast
