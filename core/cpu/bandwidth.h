#pragma once
#include <cstdint>

#include "cpu/isa.h"

// Reading memory as fast as the processor can: nothing but loads, as wide as the level has them. Whatever a
// kernel does with the bytes that it reads, it cannot have them any sooner.
namespace encast {

// Buffers of the probes are multiples of it, and aligned to 64 bytes.
constexpr int64_t kReadBlock = 512;

struct ReadProbe {
  Isa isa;
  bool prefetch;  // a page ahead, by instructions
  // Reads `bytes` (more than 0) from the first to the last, `passes` (more than 0) times.
  void (*run)(const void* data, int64_t bytes, int64_t passes);
};

// The probe with the widest loads that the allowed levels have. Which of the two forms is the faster one
// depends on the level of memory and on the processor: measure both.
const ReadProbe& read_probe(bool prefetch);

}  // namespace encast
