#include "timing/ceilings.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "base/error.h"
#include "cpu/bandwidth.h"
#include "cpu/peak.h"

namespace encast {
namespace {

constexpr int kMaxRounds = 10'000;
constexpr double kMaxSeconds = 1;
constexpr int64_t kMaxBytes = int64_t{1} << 36;
constexpr int64_t kHugePage = int64_t{2} << 20;

void check_rounds(int rounds, double seconds) {
  if (rounds < 1 || rounds > kMaxRounds)
    throw InputError("rounds is " + std::to_string(rounds) + "; 1 to " + std::to_string(kMaxRounds) +
                     " are accepted");
  if (!(seconds > 0 && seconds <= kMaxSeconds))
    throw InputError("seconds is " + std::to_string(seconds) + "; more than 0 and at most 1 are accepted");
}

const PeakProbe& probe_of(std::string_view dtype, Isa isa) {
  for (const PeakProbe& probe : peak_probes())
    if (probe.dtype == dtype && probe.isa == isa && isa_allowed(isa)) return probe;
  std::string accepted;
  for (const PeakProbe& probe : peak_probes())
    if (isa_allowed(probe.isa))
      accepted += (accepted.empty() ? "" : ", ") + std::string(probe.dtype) + " " + isa_name(probe.isa);
  throw InputError("no product instruction of " + std::string(dtype) + " at level " + isa_name(isa) +
                   " may run here; there are " + accepted);
}

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte[], Free>;

}  // namespace

std::vector<Round> measure_ops(std::string_view dtype, Isa isa, const TeamOptions& options, int rounds,
                               double seconds) {
  check_rounds(rounds, seconds);
  const PeakProbe& probe = probe_of(dtype, isa);
  // Some ten microseconds: the clock is asked seldom enough.
  constexpr int64_t kPasses = 1000;
  Team team(options);
  return measure_rounds(team, rounds, seconds, [&probe](int) {
    probe.run(kPasses);
    return static_cast<double>(kPasses * probe.ops);
  });
}

std::vector<Round> measure_reads(int64_t bytes, bool prefetch, const TeamOptions& options, int rounds,
                                 double seconds) {
  check_rounds(rounds, seconds);
  if (bytes < kReadBlock || bytes > kMaxBytes || bytes % kReadBlock != 0)
    throw InputError("bytes is " + std::to_string(bytes) + "; multiples of " + std::to_string(kReadBlock) +
                     " up to " + std::to_string(kMaxBytes) + " are accepted");
  Team team(options);
  std::vector<Buffer> buffers;
  const int64_t allocated = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  for (int thread = 0; thread < team.size(); ++thread) {
    buffers.emplace_back(
        static_cast<std::byte*>(std::aligned_alloc(kHugePage, static_cast<size_t>(allocated))));
    if (buffers.back() == nullptr)
      throw ResourceError("no memory for buffers of " + std::to_string(bytes) + " bytes a thread; free some");
    // Walks through page tables are no property of the memory. Advice: it does not matter whether it is
    // taken.
    madvise(buffers.back().get(), static_cast<size_t>(allocated), MADV_HUGEPAGE);
  }
  // The thread that reads them writes them first, so that they lie on its node. Pages that were never written
  // would all be one page of zeros.
  auto fill = [&](int thread) {
    std::memset(buffers[static_cast<size_t>(thread)].get(), 1, static_cast<size_t>(bytes));
  };
  team.run(fill);
  // Some ten microseconds: small buffers several times, of large ones the next piece.
  constexpr int64_t kAtATime = int64_t{1} << 20;
  const ReadProbe& probe = read_probe(prefetch);
  const int64_t passes = std::max(kAtATime / bytes, int64_t{1});
  struct alignas(64) Cursor {
    int64_t at = 0;
  };
  std::vector<Cursor> cursors(static_cast<size_t>(team.size()));
  return measure_rounds(team, rounds, seconds, [&](int thread) {
    int64_t& at = cursors[static_cast<size_t>(thread)].at;
    const int64_t piece = std::min(kAtATime, bytes - at);
    probe.run(buffers[static_cast<size_t>(thread)].get() + at, piece, passes);
    at = at + piece == bytes ? 0 : at + piece;
    return static_cast<double>(passes * piece);
  });
}

std::vector<double> measure_barriers(const TeamOptions& options, int rounds) {
  check_rounds(rounds, kMaxSeconds);
  constexpr int kBarriers = 1000;
  Team team(options);
  std::vector<double> nanoseconds;
  for (int i = 0; i < rounds; ++i) {
    double elapsed = 0;
    auto meet = [&](int thread) {
      team.barrier();
      const double start = wall_seconds();
      for (int j = 0; j < kBarriers; ++j) team.barrier();
      if (thread == 0) elapsed = wall_seconds() - start;
    };
    team.run(meet);
    nanoseconds.push_back(team.size() == 1 ? 0 : elapsed / kBarriers * 1e9);
  }
  return nanoseconds;
}

}  // namespace encast
