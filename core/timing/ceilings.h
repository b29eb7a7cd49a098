#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/isa.h"
#include "parallel/team.h"
#include "timing/rounds.h"

// What bounds a step on this machine: the rate of the product instructions, the bandwidth of each level of
// memory, and the hand-over between threads. Every function measures on a team of its own, started with
// `team`, and takes about `rounds * seconds`. All throw InputError on sizes out of range, and ResourceError
// when threads cannot be started or pinned or memory is short.
namespace encast {

// Multiplications and additions a second of the probe of that dtype and level (cpu/peak.h). InputError when
// there is none, or the level is not allowed.
std::vector<Round> measure_ops(std::string_view dtype, Isa isa, const TeamOptions& team, int rounds,
                               double seconds);

// Bytes a second that the threads read, each from `bytes` (a multiple of kReadBlock) of its own, over and
// over.
std::vector<Round> measure_reads(int64_t bytes, bool prefetch, const TeamOptions& team, int rounds,
                                 double seconds);

// Nanoseconds of wall time that a barrier of the busy team takes, a value a round; zeros for one thread.
std::vector<double> measure_barriers(const TeamOptions& team, int rounds);

}  // namespace encast
