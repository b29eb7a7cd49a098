#include "runtime/head_tasks.h"

#include <vector>

#include "testing/check.h"
#include "testing/random.h"

using namespace encast;

namespace {

struct Groups {
  Groups(const std::vector<int32_t>& lengths, int64_t most) : cu(1, 0), ranges(lengths.size()) {
    for (const int32_t length : lengths) cu.push_back(cu.back() + length);
    ranges.resize(static_cast<size_t>(group_sequences(cu, most, ranges)));
  }
  int64_t tokens(Range range) const {
    return cu[static_cast<size_t>(range.end)] - cu[static_cast<size_t>(range.begin)];
  }

  std::vector<int32_t> cu;
  std::vector<Range> ranges;
};

}  // namespace

ENCAST_TEST(every_sequence_is_in_one_group) {
  testing::Rng rng(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int32_t> lengths;
    for (int64_t seq = rng.integer(0, 40); seq > 0; --seq) {
      lengths.push_back(static_cast<int32_t>(rng.integer(1, round % 2 == 0 ? 20 : 600)));
    }
    const int64_t most = rng.integer(1, 300);
    const Groups groups(lengths, most);
    std::vector<int> seen(lengths.size(), 0);
    int64_t before = 1 << 20;
    for (const Range range : groups.ranges) {
      CHECK(range.begin < range.end);
      CHECK(range.end - range.begin == 1 || groups.tokens(range) <= most);
      CHECK(groups.tokens(range) <= before);
      before = groups.tokens(range);
      for (int64_t seq = range.begin; seq < range.end; ++seq) ++seen[static_cast<size_t>(seq)];
    }
    for (const int count : seen) CHECK_EQ(count, 1);
  }
}

ENCAST_TEST(the_last_groups_are_half_as_large) {
  const Groups groups(std::vector<int32_t>(8, 128), 256);
  std::vector<int64_t> tokens;
  for (const Range range : groups.ranges) tokens.push_back(groups.tokens(range));
  CHECK((tokens == std::vector<int64_t>{256, 256, 128, 128, 128, 128}));
}

ENCAST_TEST(heads_of_a_task_fill_panels) {
  CHECK_EQ(heads_of_panels(64), 1);
  CHECK_EQ(heads_of_panels(32), 2);
  CHECK_EQ(heads_of_panels(128), 1);
  CHECK_EQ(heads_of_panels(96), 2);
  CHECK_EQ(heads_of_panels(80), 4);
  CHECK_EQ(heads_of_panels(1), 64);
  CHECK(heads_fill_panels(12, 64) && heads_fill_panels(12, 32) && heads_fill_panels(4, 80));
  CHECK(!heads_fill_panels(12, 26) && !heads_fill_panels(3, 32) && !heads_fill_panels(1, 16));
}

ENCAST_TEST(few_tasks_must_be_shared_out_evenly) {
  CHECK(tasks_suffice(6, 2) && tasks_suffice(12, 3) && tasks_suffice(17, 4) && tasks_suffice(1, 1));
  CHECK(!tasks_suffice(7, 2) && !tasks_suffice(15, 4) && !tasks_suffice(1, 2));
}

ENCAST_TEST_MAIN
