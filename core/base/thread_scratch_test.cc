#include "base/thread_scratch.h"

#include <cstring>
#include <thread>

#include "testing/check.h"

namespace encast {
namespace {

ENCAST_TEST(stays_until_it_has_to_grow) {
  uint8_t* const first = thread_scratch(100);
  CHECK(first != nullptr && reinterpret_cast<uintptr_t>(first) % 64 == 0);
  std::memset(first, 1, 100);
  CHECK_EQ(thread_scratch(64), first);
  uint8_t* const more = thread_scratch(1 << 20);
  CHECK(more != nullptr && reinterpret_cast<uintptr_t>(more) % 64 == 0);
  std::memset(more, 2, 1 << 20);
  CHECK_EQ(thread_scratch(100), more);
}

ENCAST_TEST(is_each_threads_own) {
  uint8_t* const mine = thread_scratch(100);
  uint8_t* other = nullptr;
  std::thread([&] { other = thread_scratch(100); }).join();
  CHECK(other != nullptr && other != mine);
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
