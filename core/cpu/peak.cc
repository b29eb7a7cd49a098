#include "cpu/peak.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/error.h"

namespace encast {

#define ENCAST_PEAK(dtype, isa, name, ops) void name(int64_t passes);
#include "cpu/peak.inc"
#undef ENCAST_PEAK

namespace {

using Clock = std::chrono::steady_clock;

// Many short rounds: a few of them run at the highest clock frequency.
constexpr double kRoundSeconds = 0.01;
constexpr int kMinRounds = 5;
constexpr int kMaxThreads = 4096;
constexpr double kMaxSeconds = 60;
// Some ten microseconds: the clock is asked seldom enough, and no round is overrun by much.
constexpr int64_t kPassesAtATime = 1000;

// The clock may have missed some of a round that had less than this of the most: where a host takes a
// processor away, rates of up to 4 times the peak were seen. Of the most, since under a quota or of more
// threads than processors none has all.
constexpr double kWhole = 0.8;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Processor time of the calling thread: what other processes take from it does not count.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// All threads work side by side, and their rates are added.
PeakRound run_round(const PeakProbe& probe, int threads, double seconds) {
  std::atomic<int> waiting{threads};
  std::atomic<bool> abandoned{false};
  std::vector<PeakRound> own(static_cast<size_t>(threads));
  const auto work = [&](int index) {
    waiting.fetch_sub(1);
    while (waiting.load() > 0) {
      if (abandoned.load()) return;
      std::this_thread::yield();
    }
    const Clock::time_point start = Clock::now();
    const double busy = thread_seconds();
    int64_t passes = 0;
    do {
      probe.run(kPassesAtATime);
      passes += kPassesAtATime;
    } while (seconds_since(start) < seconds);
    const double taken = thread_seconds() - busy;
    const double rate = taken > 0 ? static_cast<double>(passes * probe.ops) / taken : 0;
    // Not above 1, where the clock of threads ticks coarsely.
    own[static_cast<size_t>(index)] = {rate, std::min(1.0, taken / seconds_since(start))};
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
  } catch (const std::system_error& error) {
    abandoned.store(true);
    for (std::thread& thread : others) thread.join();
    throw ResourceError("the peak of " + std::to_string(threads) +
                        " threads cannot be measured: " + error.what() + "; ask for fewer threads");
  }
  work(0);
  for (std::thread& thread : others) thread.join();
  PeakRound all{0, own.front().share};
  for (const PeakRound& one : own) all = {all.rate + one.rate, std::min(all.share, one.share)};
  return all;
}

}  // namespace

const std::vector<PeakProbe>& peak_probes() {
  static const std::vector<PeakProbe> probes = {
#define ENCAST_PEAK(dtype, isa, name, ops) {#dtype, Isa::isa, ops, &name},
#include "cpu/peak.inc"
#undef ENCAST_PEAK
  };
  return probes;
}

const PeakProbe& peak_probe(std::string_view dtype) {
  const PeakProbe* best = nullptr;
  for (const PeakProbe& probe : peak_probes())
    if (probe.dtype == dtype && probe.isa <= isa_best() && isa_allowed(probe.isa)) best = &probe;
  if (best == nullptr)
    throw InputError("dtype is \"" + std::string(dtype) +
                     "\"; the peak of f32, bf16 and int8 can be measured");
  return *best;
}

double best_rate(const std::vector<PeakRound>& rounds) {
  double share = 0, best = 0;
  for (const PeakRound& one : rounds) share = std::max(share, one.share);
  for (const PeakRound& one : rounds)
    if (one.share >= kWhole * share) best = std::max(best, one.rate);
  return best;
}

double peak_ops_per_second(std::string_view dtype, int threads, double seconds) {
  if (threads < 1 || threads > kMaxThreads)
    throw InputError("threads is " + std::to_string(threads) + "; 1 to " + std::to_string(kMaxThreads) +
                     " are accepted");
  if (!(seconds > 0 && seconds <= kMaxSeconds))
    throw InputError("seconds is " + std::to_string(seconds) + "; more than 0 and at most 60 are accepted");
  const PeakProbe& probe = peak_probe(dtype);
  const int rounds = std::max(kMinRounds, static_cast<int>(seconds / kRoundSeconds));
  std::vector<PeakRound> taken;
  for (int i = 0; i < rounds; ++i) taken.push_back(run_round(probe, threads, seconds / rounds));
  return best_rate(taken);
}

}  // namespace encast
