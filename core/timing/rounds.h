#pragma once
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "parallel/team.h"

// Rates are measured in many short rounds: a few of them run undisturbed and at the highest clock frequency.
namespace encast {

// Processor time of the calling thread: what other processes take from it does not count.
inline double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Round {
  double rate;  // units a second of the threads' processor time, summed over the threads
  // The smallest part of the round that a thread had a processor for. What the threads share (a cache, the
  // memory) is there for the others alone while one of them waits: rates of such rounds are too good.
  double running;
};

// Every thread of the team calls `work(thread)`, which returns how many units it did and takes some
// microseconds, over and over for `seconds` in each of the rounds.
template <class Work>
std::vector<Round> measure_rounds(Team& team, int rounds, double seconds, const Work& work) {
  struct alignas(64) PerThread {
    double rate, spent, start, end;
  };
  std::vector<PerThread> threads(static_cast<size_t>(team.size()));
  std::vector<Round> result;
  auto one_round = [&](int thread) {
    team.barrier();
    const double start = wall_seconds(), busy = thread_seconds();
    double units = 0, end = 0;
    do {
      units += work(thread);
      end = wall_seconds();
    } while (end - start < seconds);
    const double spent = thread_seconds() - busy;
    threads[static_cast<size_t>(thread)] = {units / spent, spent, start, end};
  };
  for (int i = 0; i < rounds; ++i) {
    team.run(one_round);
    // From the first start to the last end: a thread may lose its processor before it gets to its start.
    double start = threads[0].start, end = threads[0].end;
    for (const PerThread& one : threads) {
      start = std::min(start, one.start);
      end = std::max(end, one.end);
    }
    Round sum{0, 1};
    for (const PerThread& one : threads) {
      sum.rate += one.rate;
      sum.running = std::min(sum.running, one.spent / (end - start));
    }
    result.push_back(sum);
  }
  return result;
}

}  // namespace encast
