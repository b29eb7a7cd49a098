#include <csetjmp>
#include <csignal>
#include <set>

#include "testing/check.h"
#include "testing/guard.h"
#include "testing/random.h"
#include "testing/tolerance.h"

// The helpers are tested too: a check that cannot fail would hide every defect behind it.
namespace encast::testing {
namespace {

sigjmp_buf fault_return;

// True if reading or writing the byte faults.
template <class Access>
bool faults(Access access) {
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_handler = [](int) { siglongjmp(fault_return, 1); };
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  volatile bool faulted = true;  // lives across the jump
  if (sigsetjmp(fault_return, 1) == 0) {
    access();
    faulted = false;
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  return faulted;
}

ENCAST_TEST(failed_checks_throw) {
  CHECK_THROWS(CHECK(1 == 2, "m=", 7), CheckFailure, "1 == 2 [m=7]");
  CHECK_THROWS(CHECK_EQ(1, 2), CheckFailure, "1 and 2");
  CHECK_THROWS(CHECK_LE(std::nan(""), 1.0), CheckFailure, "nan");
  const float zeros[] = {0.0f, 0.0f}, signed_zeros[] = {0.0f, -0.0f};
  CHECK_THROWS(CHECK_SAME_BITS(zeros, signed_zeros, 2u), CheckFailure, "element 1 of 2");
  CHECK_THROWS(CHECK_THROWS((void)0, CheckFailure, ""), CheckFailure, "should throw");
  CHECK_EQ(2, 2);
  CHECK_LE(1, 1);
}

ENCAST_TEST(guards_fault_on_both_sides) {
  GuardedBuffer<float> buffer(33);
  buffer[0] = buffer[32] = 1.0f;
  volatile float* past = buffer.data() + 33;
  CHECK(faults([&] { (void)*past; }));
  CHECK(faults([&] { *past = 0.0f; }));
  const long page = sysconf(_SC_PAGESIZE);
  volatile float* below = buffer.data() - 2 * page / static_cast<long>(sizeof(float));
  CHECK(faults([&] { (void)*below; }));
  buffer.make_read_only();
  volatile float* inside = buffer.data();
  CHECK(!faults([&] { (void)*inside; }));
  CHECK(faults([&] { *inside = 0.0f; }));
}

ENCAST_TEST(slack_shows_stray_writes) {
  GuardedBuffer<uint8_t> after(10, 3), before(10, 3);
  CHECK(after.check_slack());
  after.data()[10] = 0;
  CHECK(!after.check_slack());
  before.data()[-1] = 0;
  CHECK(!before.check_slack());
}

ENCAST_TEST(random_numbers_repeat_and_spread) {
  Rng one(1), same(1), other(2);
  const uint64_t first = one.bits();
  CHECK_EQ(first, same.bits());
  CHECK(first != other.bits());
  std::set<int64_t> seen;
  double sum = 0, squares = 0;
  for (int i = 0; i < 4000; ++i) {
    seen.insert(one.integer(-2, 2));
    const float u = one.uniform(3.0f, 4.0f);
    CHECK(u >= 3.0f && u <= 4.0f, "u=", u);
    const double x = one.normal();
    sum += x;
    squares += x * x;
  }
  CHECK_EQ(seen.size(), 5u);
  CHECK_EQ(*seen.begin(), -2);
  CHECK_LE(std::abs(sum / 4000), 0.1);  // six deviations
  CHECK_LE(std::abs(squares / 4000 - 1), 0.15);
}

ENCAST_TEST(ulps_count_floats) {
  CHECK_EQ(ulps_between(1.0f, 1.0f), 0);
  CHECK_EQ(ulps_between(0.0f, -0.0f), 0);
  CHECK_EQ(ulps_between(1.0f, std::nextafter(1.0f, 2.0f)), 1);
  CHECK_EQ(ulps_between(std::numeric_limits<float>::denorm_min(), -std::numeric_limits<float>::denorm_min()),
           2);
  CHECK_LE(int64_t{1} << 40, ulps_between(std::nanf(""), 1.0f));
}

}  // namespace
}  // namespace encast::testing

ENCAST_TEST_MAIN
