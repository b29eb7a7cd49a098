#include "runtime/attention_tasks.h"

#include <numeric>
#include <vector>

#include "testing/check.h"

using namespace encast;

namespace {

struct Batch {
  explicit Batch(std::vector<int32_t> lengths) : cu(1, 0), order(lengths.size()) {
    for (const int32_t length : lengths) cu.push_back(cu.back() + length);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const auto at = [&](int32_t i) { return lengths[static_cast<size_t>(i)]; };
      return at(a) != at(b) ? at(a) > at(b) : a < b;
    });
  }
  AttentionTasks tasks(int64_t heads, int threads) const { return {cu, order, heads, threads}; }

  std::vector<int32_t> cu, order;
};

}  // namespace

ENCAST_TEST(every_query_of_every_head_once) {
  for (const Batch& batch : {Batch({512}), Batch({5, 400, 7, 1, 96, 192}), Batch({1}), Batch({}),
                             Batch({1000, 1000, 3}), Batch(std::vector<int32_t>(40, 17))}) {
    for (const int heads : {1, 5, 12}) {
      for (const int threads : {1, 2, 3, 16, 64}) {
        const AttentionTasks tasks = batch.tasks(heads, threads);
        std::vector<int> seen(static_cast<size_t>(batch.cu.back() * heads));
        for (int64_t index = 0; index < tasks.count(); ++index) {
          const AttentionTask task = tasks.at(index);
          CHECK(task.queries.begin < task.queries.end);
          for (int64_t q = task.queries.begin; q < task.queries.end; ++q) {
            ++seen[static_cast<size_t>((batch.cu[static_cast<size_t>(task.seq)] + q) * heads + task.head)];
          }
        }
        for (const int times : seen) CHECK_EQ(times, 1, "heads ", heads, " threads ", threads);
      }
    }
  }
}

ENCAST_TEST(heads_are_cut_only_where_threads_would_wait) {
  CHECK_EQ(Batch({512}).tasks(12, 1).count(), 12);
  CHECK_EQ(Batch({512}).tasks(12, 2).count(), 12);
  CHECK_EQ(Batch({512}).tasks(12, 16).count(), 36);
  CHECK_EQ(Batch({512}).tasks(1, 64).count(), 5);  // of at least 96 queries
  CHECK_EQ(Batch({128, 128, 128, 128, 128, 128, 128, 128}).tasks(12, 16).count(), 96);
  // One long text among short ones.
  const Batch mixed({10, 1000, 12, 9});
  CHECK_EQ(mixed.tasks(2, 4).count(), 2 * 4 + 3 * 2);
  CHECK_EQ(mixed.tasks(2, 4).at(0).seq, 1);
}

ENCAST_TEST_MAIN
