#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/isa.h"

// The instruction peak: how many multiplications and additions a second the processor retires when it does
// nothing but the instruction that a matrix product is made of, operands in registers. No kernel can be
// faster, so this is what measured speed is a fraction of. A clock frequency from a data sheet would be a
// guess.
namespace encast {

struct PeakProbe {
  std::string_view dtype;
  Isa isa;
  int64_t ops;                  // in one pass
  void (*run)(int64_t passes);  // passes > 0
};

// Every probe, by dtype and then in the order of cpu/isa.inc.
const std::vector<PeakProbe>& peak_probes();

// The probe of the last level up to isa_best() that has one for "f32", "bf16" or "int8".
// Throws InputError for another dtype.
const PeakProbe& peak_probe(std::string_view dtype);

// `rate` in operations a second of processor time; `share`: the least that a thread had of a processor, of
// the time that it took.
struct PeakRound {
  double rate;
  double share;
};

// The highest rate of the rounds that had nearly as much of their processors as the one that had most; 0
// without any.
double best_rate(const std::vector<PeakRound>& rounds);

// Operations a second of `threads` threads at once: the best of many short rounds that take `seconds`
// (0 to 60) together. A second is one of the threads' processor time, so a busy machine gives the same
// answer. Throws InputError, or ResourceError when the threads cannot be started.
double peak_ops_per_second(std::string_view dtype, int threads, double seconds);

}  // namespace encast
