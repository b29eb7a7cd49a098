#include "parallel/team.h"

#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/error.h"
#include "parallel/partition.h"
#include "testing/check.h"

namespace encast {
namespace {

ENCAST_TEST(every_thread_runs_once_a_run) {
  for (const int threads : {1, 2, 3, 5}) {
    for (const int spin_us : {0, 50}) {
      Team team({threads, {}, spin_us});
      std::vector<std::atomic<int>> counts(static_cast<size_t>(threads));
      auto job = [&](int thread) {
        counts[static_cast<size_t>(thread)].fetch_add(1, std::memory_order_relaxed);
      };
      for (int run = 0; run < 300; ++run) team.run(job);
      for (const auto& count : counts) CHECK_EQ(count.load(), 300);
    }
  }
}

// What one thread wrote before a barrier must be seen by the others after it, without other synchronisation:
// plain ints, so that the thread sanitizer objects if the barrier orders nothing.
ENCAST_TEST(barrier_orders_plain_writes) {
  constexpr int kThreads = 4;
  for (const int spin_us : {0, 100}) {
    Team team({kThreads, {}, spin_us});
    int cells[kThreads] = {};
    std::atomic<int> wrong{0};
    auto job = [&](int thread) {
      for (int round = 1; round <= 200; ++round) {
        cells[thread] = round;
        team.barrier();
        for (const int cell : cells) {
          if (cell != round) wrong.fetch_add(1);
        }
        team.barrier();
      }
    };
    team.run(job);
    CHECK_EQ(wrong.load(), 0);
  }
}

ENCAST_TEST(results_are_visible_when_run_returns) {
  Team team({3, {}, 0});
  int sums[3] = {};
  for (int run = 1; run <= 200; ++run) {
    auto job = [&](int thread) { sums[thread] = run * (thread + 1); };
    team.run(job);
    CHECK_EQ(sums[0] + sums[1] + sums[2], run * 6);
  }
}

ENCAST_TEST(an_idle_team_sleeps) {
  Team team({2, {}, 100});
  auto nothing = [](int) {};
  team.run(nothing);
  const auto cpu_ns = [] {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
  };
  timespec pause{0, 20'000'000};
  nanosleep(&pause, nullptr);
  const long long before = cpu_ns();
  pause.tv_nsec = 200'000'000;
  nanosleep(&pause, nullptr);
  // A spinning worker would have burnt 200 ms.
  CHECK_LE(cpu_ns() - before, 100'000'000LL);
}

ENCAST_TEST(pinned_workers_stand_on_their_cpu_and_the_caller_keeps_its_mask) {
  cpu_set_t allowed;
  CHECK_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  if (cpus.size() < 2) SKIP_TEST("one CPU in the affinity mask; pinning needs two");
  Team team({2, cpus, 100});
  int place[2] = {-1, -1};
  auto job = [&](int thread) { place[thread] = sched_getcpu(); };
  for (int run = 0; run < 50; ++run) {
    team.run(job);
    CHECK_EQ(place[1], cpus[1]);
    CHECK(place[0] != cpus[1]);
  }
  cpu_set_t after;
  CHECK_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
  CHECK(CPU_EQUAL(&allowed, &after));
}

ENCAST_TEST(a_forked_child_can_let_go_of_the_team) {
  auto team = std::make_unique<Team>(TeamOptions{3, {}, 0});
  auto nothing = [](int) {};
  team->run(nothing);
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // a child that waits for threads which it does not have is killed
    team.reset();
    _exit(0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  team->run(nothing);
}

ENCAST_TEST(impossible_teams_are_refused) {
  const auto team_of = [](int threads, std::vector<int> cpus) { Team team({threads, std::move(cpus), 0}); };
  CHECK_THROWS(team_of(0, {}), ResourceError, "at least one thread");
  CHECK_THROWS((team_of(2, {0})), ResourceError, "one CPU a thread");
  CHECK_THROWS((team_of(2, {0, -1})), ResourceError, "does not exist");
  // No machine of ours has that CPU.
  CHECK_THROWS((team_of(2, {0, CPU_SETSIZE - 1})), ResourceError, "could not be pinned");
}

ENCAST_TEST(split_covers_everything_once) {
  for (int64_t count = 0; count < 70; ++count) {
    for (const int64_t grain : {1, 6, 16}) {
      for (int parts = 1; parts < 6; ++parts) {
        int64_t next = 0;
        for (int part = 0; part < parts; ++part) {
          const Range range = split({0, count}, grain, part, parts);
          CHECK_EQ(range.begin, next);
          CHECK_LE(range.begin, range.end);
          CHECK(range.end == count || range.end % grain == 0);
          next = range.end;
        }
        CHECK_EQ(next, count);
      }
    }
  }
}

ENCAST_TEST(blocks_cover_everything_once_and_are_alike) {
  for (int64_t rows = 0; rows < 900; ++rows) {
    for (const int64_t most : {16, 32, 48, 96, 384}) {
      for (int variant = 2; variant < 10; ++variant) {
        const int parts = variant / 2;
        const Blocks blocks(rows, most, parts, variant % 2 == 1);
        const int64_t grain = blocks.grain;
        int64_t next = 0, least = most, largest = 0;
        for (int64_t index = 0; index < blocks.count; ++index) {
          const Range range = blocks.at(index);
          CHECK_EQ(range.begin, next);
          CHECK(range.end > range.begin && range.end - range.begin <= most);
          next = range.end;
          if (index >= blocks.whole) {
            CHECK_LE(range.end - range.begin, most / 2 + grain);  // one of two halves
            continue;
          }
          largest = std::max(largest, range.end - range.begin);
          if (index + 1 < blocks.count) least = std::min(least, range.end - range.begin);
        }
        CHECK_EQ(next, rows);
        // The last block alone may hold a register tile that is not whole.
        CHECK(blocks.whole < 2 || largest - least <= (grain == kTileGrain ? 0 : grain));
        CHECK(blocks.count % parts == 0 || blocks.count == (rows + grain - 1) / grain);
        CHECK(blocks.whole == blocks.count || blocks.whole >= 3 * parts);
      }
    }
  }
}

ENCAST_TEST(blocks_of_tiles_cover_everything_once_and_threads_get_as_many) {
  for (int64_t rows = 0; rows < 700; ++rows) {
    for (const int64_t tile : {16, 48, 64, 128}) {
      for (int parts = 1; parts < 6; ++parts) {
        const TileBlocks blocks(rows, tile, parts);
        int64_t next = 0;
        for (int64_t index = 0; index < blocks.count; ++index) {
          const Range range = blocks.at(index);
          CHECK_EQ(range.begin, next);
          CHECK(range.end > range.begin && range.end - range.begin <= tile);
          CHECK(index >= blocks.whole || range.end - range.begin == tile);
          next = range.end;
        }
        CHECK_EQ(next, rows);
        CHECK_EQ(blocks.whole % parts, 0);
        CHECK_LE(blocks.count - blocks.whole, parts);
      }
    }
  }
  // 192 rows of two threads are 64 and 32 for each, not two tiles and one.
  CHECK_EQ(TileBlocks(192, 64, 2).count, 4);
  CHECK_EQ(TileBlocks(192, 64, 2).at(2).end, 160);
  CHECK_EQ(TileBlocks(48, 64, 2).at(0).end, 24);
}

// 512 rows of two threads are 16 tiles of 32, not 17 and a rest of two.
ENCAST_TEST(rows_are_cut_between_whole_tiles_of_amx_where_threads_get_as_many) {
  for (const int64_t rows : {192, 256, 512, 500}) {
    CHECK_EQ(split_product({0, rows}, 48, 0, 2, true).rows.end, round_up(rows, 64) / 2);
    CHECK_EQ(Blocks(rows, 384, 2, true).at(0).end, round_up(rows, 64) / 2);
  }
  CHECK_EQ(Blocks(1024, 384, 2, true).at(0).end, 256);
  CHECK_EQ(Blocks(160, 384, 2, true).at(0).end, 78);   // three tiles and two would be 96 rows
  CHECK_EQ(Blocks(960, 384, 2, true).at(0).end, 240);  // 30 tiles are not four times as many
  CHECK_EQ(Blocks(32, 384, 2, true).count, 2);
  CHECK_EQ(Blocks(512, 384, 2, false).at(0).end, 258);
}

ENCAST_TEST(split_product_covers_everything_once) {
  for (const int64_t rows : {0, 1, 5, 6, 7, 31, 32, 100, 128, 500, 1024}) {
    for (const int64_t panels : {1, 2, 3, 12, 48}) {
      for (int variant = 2; variant < 10; ++variant) {
        const int parts = variant / 2;
        const bool tiles = variant % 2 == 1;
        std::vector<int> seen(static_cast<size_t>(rows * panels), 0);
        for (int part = 0; part < parts; ++part) {
          const Tile tile = split_product({0, rows}, panels, part, parts, tiles);
          for (int64_t row = tile.rows.begin; row < tile.rows.end; ++row) {
            for (int64_t panel = tile.panels.begin; panel < tile.panels.end; ++panel) {
              ++seen[static_cast<size_t>(row * panels + panel)];
            }
          }
        }
        for (const int count : seen) CHECK_EQ(count, 1);
      }
    }
  }
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
