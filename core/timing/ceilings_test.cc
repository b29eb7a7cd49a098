#include "timing/ceilings.h"

#include <cmath>

#include "base/error.h"
#include "cpu/bandwidth.h"
#include "cpu/peak.h"
#include "testing/check.h"

namespace encast {
namespace {

TeamOptions unpinned(int threads) { return {threads, {}, 1000}; }

void check_rounds(const std::vector<Round>& rounds, size_t count) {
  CHECK_EQ(rounds.size(), count);
  for (const Round& round : rounds) {
    CHECK(std::isfinite(round.rate) && round.rate > 0);
    CHECK(round.running > 0);
  }
}

ENCAST_TEST(rounds_count_what_was_done_in_processor_time) {
  // A unit takes a millisecond of spinning, so every thread does no more than a thousand a second.
  for (const int threads : {1, 2}) {
    Team team(unpinned(threads));
    const auto rounds = measure_rounds(team, 3, 0.01, [](int) {
      const double until = thread_seconds() + 1e-3;
      while (thread_seconds() < until) continue;
      return 1.0;
    });
    check_rounds(rounds, 3);
    for (const Round& round : rounds) CHECK(round.rate <= 1000.0 * threads, "rate=", round.rate);
  }
}

ENCAST_TEST(every_allowed_probe_gives_a_rate) {
  for (const PeakProbe& probe : peak_probes()) {
    if (!isa_allowed(probe.isa)) continue;
    for (const int threads : {1, 2})
      check_rounds(measure_ops(probe.dtype, probe.isa, unpinned(threads), 2, 1e-4), 2);
  }
}

ENCAST_TEST(reads_give_a_rate) {
  for (const int64_t bytes : {kReadBlock, 1000 * kReadBlock})
    for (const bool prefetch : {false, true})
      for (const int threads : {1, 2})
        check_rounds(measure_reads(bytes, prefetch, unpinned(threads), 2, 1e-4), 2);
}

ENCAST_TEST(barriers_cost_nothing_alone) {
  for (const double nanoseconds : measure_barriers(unpinned(1), 2)) CHECK_EQ(nanoseconds, 0.0);
  const std::vector<double> two = measure_barriers(unpinned(2), 2);
  CHECK_EQ(two.size(), 2u);
  for (const double nanoseconds : two) CHECK(std::isfinite(nanoseconds) && nanoseconds > 0);
}

ENCAST_TEST(wrong_requests_are_refused) {
  const TeamOptions one = unpinned(1);
  CHECK_THROWS(measure_ops("f16", Isa::scalar, one, 1, 0.01), InputError, "there are f32 scalar");
  CHECK_THROWS(measure_ops("f32", Isa::avx512vnni, one, 1, 0.01), InputError, "f32 at level avx512vnni");
  CHECK_THROWS(measure_ops("f32", Isa::scalar, one, 0, 0.01), InputError, "rounds is 0");
  CHECK_THROWS(measure_ops("f32", Isa::scalar, one, 1, std::nan("")), InputError, "seconds is");
  CHECK_THROWS(measure_reads(kReadBlock + 1, false, one, 1, 0.01), InputError, "multiples of 512");
  CHECK_THROWS(measure_reads(0, false, one, 1, 0.01), InputError, "bytes is 0");
  CHECK_THROWS(measure_reads(int64_t{1} << 40, false, one, 1, 0.01), InputError, "up to");
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
