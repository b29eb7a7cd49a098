#include "runtime/pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/error.h"
#include "runtime/test_plan.h"
#include "testing/check.h"

namespace encast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAtOnce{0};
constexpr milliseconds kLong{20'000};

class Model {
 public:
  Model() : file_(testing::test_weights()), weights_(std::make_shared<Weights>(file_.path())) {}
  std::vector<std::unique_ptr<Executor>> instances(int count) {
    std::vector<std::unique_ptr<Executor>> made;
    for (int index = 0; index < count; ++index) {
      made.push_back(
          std::make_unique<Executor>(Plan::parse(testing::kTestPlan), weights_, TeamOptions{2, {}, 0}));
    }
    return made;
  }

 private:
  testing::TemporaryFile file_;
  std::shared_ptr<Weights> weights_;
};

ENCAST_TEST(an_executor_has_one_holder_and_the_last_used_comes_first) {
  Model model;
  ExecutorPool pool(model.instances(2));
  const Executor* first = nullptr;
  {
    const auto a = pool.lease_within(kAtOnce);
    first = a.operator->();
    CHECK(first != nullptr);
  }
  const auto a = pool.lease_within(kAtOnce);
  const auto b = pool.lease_within(kAtOnce);
  CHECK(a.operator->() == first);
  CHECK(b && b.operator->() != first);
  CHECK(!pool.lease_within(kAtOnce));
  CHECK(!pool.lease_within(milliseconds(5)));
}

ENCAST_TEST(callers_take_turns) {
  Model model;
  ExecutorPool pool(model.instances(2));
  std::atomic<int> inside{0}, most{0}, served{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 200; ++turn) {
        const auto lease = pool.lease_within(kLong);
        const int now = ++inside;
        int seen = most.load();
        while (seen < now && !most.compare_exchange_weak(seen, now)) {
        }
        if (lease) ++served;
        --inside;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(served.load(), 6 * 200);
  CHECK(most <= 2);
}

ENCAST_TEST(closing_waits_for_leases_and_turns_away_who_waits) {
  Model model;
  ExecutorPool pool(model.instances(1));
  std::atomic<bool> ended{false}, closed_after{false}, turned_away{false};
  auto lease = std::make_unique<ExecutorPool::Lease>(pool.lease_within(kAtOnce));
  std::thread waiting([&] {
    try {
      pool.lease_within(kLong);
    } catch (const ResourceError&) {
      turned_away = true;
    }
  });
  std::this_thread::sleep_for(milliseconds(20));
  std::thread closing([&] {
    pool.close();
    closed_after = ended.load();
  });
  waiting.join();
  std::this_thread::sleep_for(milliseconds(20));
  ended = true;
  lease.reset();
  closing.join();
  CHECK(turned_away);
  CHECK(closed_after);
  pool.close();
  CHECK_THROWS(pool.lease_within(kAtOnce), ResourceError, "is closed");
}

ENCAST_TEST(a_forked_child_lets_go_of_a_pool_in_use) {
  Model model;
  auto pool = std::make_unique<ExecutorPool>(model.instances(1));
  auto lease = std::make_unique<ExecutorPool::Lease>(pool->lease_within(kAtOnce));
  std::atomic<bool> served{false};
  std::thread waiting([&] { served = static_cast<bool>(pool->lease_within(kLong)); });
  std::this_thread::sleep_for(milliseconds(20));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    pool.reset();
    _exit(0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  lease.reset();
  waiting.join();
  CHECK(served);
}

ENCAST_TEST(a_pool_needs_an_executor) { CHECK_THROWS(ExecutorPool({}), InputError, "at least one"); }

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
