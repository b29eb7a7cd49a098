#include "cpu/peak.h"

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

constexpr int kRounds = 5;
constexpr int kMaxThreads = 4096;
constexpr double kMaxSeconds = 60;
// Some ten microseconds: the clock is asked seldom enough, and no round is overrun by much.
constexpr int64_t kPassesAtATime = 1000;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The threads begin together; the round ends with the last of them.
double operations_a_second(const PeakProbe& probe, int threads, double seconds) {
  std::atomic<int> waiting{threads};
  std::atomic<bool> abandoned{false};
  std::atomic<int64_t> passes{0};
  const auto work = [&] {
    waiting.fetch_sub(1);
    while (waiting.load() > 0)
      if (abandoned.load()) return;
    const Clock::time_point start = Clock::now();
    int64_t mine = 0;
    do {
      probe.run(kPassesAtATime);
      mine += kPassesAtATime;
    } while (seconds_since(start) < seconds);
    passes.fetch_add(mine);
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(work);
  } catch (const std::system_error& error) {
    abandoned.store(true);
    for (std::thread& thread : others) thread.join();
    throw ResourceError("the peak of " + std::to_string(threads) +
                        " threads cannot be measured: " + error.what() + "; ask for fewer threads");
  }
  const Clock::time_point start = Clock::now();
  work();
  for (std::thread& thread : others) thread.join();
  return static_cast<double>(passes.load() * probe.ops) / seconds_since(start);
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
    if (probe.dtype == dtype && isa_allowed(probe.isa)) best = &probe;
  if (best == nullptr)
    throw InputError("dtype is \"" + std::string(dtype) +
                     "\"; the peak of f32, bf16 and int8 can be measured");
  return *best;
}

double peak_ops_per_second(std::string_view dtype, int threads, double seconds) {
  if (threads < 1 || threads > kMaxThreads)
    throw InputError("threads is " + std::to_string(threads) + "; 1 to " + std::to_string(kMaxThreads) +
                     " are accepted");
  if (!(seconds > 0 && seconds <= kMaxSeconds))
    throw InputError("seconds is " + std::to_string(seconds) + "; more than 0 and at most 60 are accepted");
  const PeakProbe& probe = peak_probe(dtype);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double rate = operations_a_second(probe, threads, seconds / kRounds);
    if (rate > best) best = rate;
  }
  return best;
}

}  // namespace encast
