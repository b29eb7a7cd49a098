#include "timing/gemm.h"

#include <atomic>
#include <cmath>
#include <string>
#include <thread>

#include "base/error.h"
#include "testing/check.h"

namespace encast {
namespace {

TeamOptions unpinned(int threads) { return {threads, {}, 1000}; }

// Writes its part of the answer, all wrong.
void wrong(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin, int64_t panel_end) {
  for (int64_t i = m_begin; i < m_end; ++i)
    for (int64_t j = panel_begin * kPanel; j < panel_end * kPanel && j < args.n; ++j)
      args.c[i * args.c_stride + j] = -1e30f;
}
// Leaves the last panel out.
void lazy(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin, int64_t panel_end) {
  const KernelInfo* kernel = select_kernel("gemm_f32", "f32", args.m);
  reinterpret_cast<GemmFn>(kernel->fn)(args, m_begin, m_end, panel_begin, panel_end - 1);
}

ENCAST_TEST(every_kernel_is_right_and_takes_time) {
  for (const char* dtype : {"f32", "bf16", "int8"})
    for (const int threads : {1, 2})
      for (const int64_t m : {1, 7, 150}) {
        GemmTimer timer(dtype, m, 130, 67, 1 << 20, unpinned(threads));
        CHECK(!timer.kernels().empty());
        for (const KernelInfo* kernel : timer.kernels()) {
          CHECK(timer.check(*kernel), kernel->name, " m=", m, " threads=", threads);
          const double seconds = timer.run(*kernel, 3);
          CHECK(std::isfinite(seconds) && seconds > 0);
        }
      }
}

ENCAST_TEST(wrong_answers_are_found) {
  GemmTimer timer("f32", 5, 130, 67, 0, unpinned(1));
  KernelInfo fake = *timer.kernels().front();
  fake.fn = reinterpret_cast<AnyKernel>(&wrong);
  CHECK(!timer.check(fake));
  CHECK(timer.check(*timer.kernels().front()));
  fake.fn = reinterpret_cast<AnyKernel>(&lazy);
  CHECK(!timer.check(fake));
}

ENCAST_TEST(callers_of_one_timer_take_turns) {
  GemmTimer timer("f32", 7, 130, 67, 0, unpinned(2));
  const KernelInfo& kernel = *timer.kernels().front();
  std::atomic<int> wrong{0};
  const auto work = [&] {
    for (int turn = 0; turn < 200; ++turn) {
      if (!timer.check(kernel)) ++wrong;
    }
  };
  std::thread other(work);
  work();
  other.join();
  CHECK_EQ(wrong.load(), 0);
}

ENCAST_TEST(the_bytes_of_weights_are_the_packed_ones) {
  CHECK_EQ(GemmTimer("f32", 1, 65, 10, 0, unpinned(1)).weight_bytes(), 128 * 10 * 4);
  CHECK_EQ(GemmTimer("int8", 1, 65, 10, 0, unpinned(1)).weight_bytes(), 128 * 12);
}

ENCAST_TEST(wrong_requests_are_refused) {
  const auto make = [](const char* dtype, int64_t m, int64_t n, int64_t k, int64_t bytes) {
    GemmTimer(dtype, m, n, k, bytes, unpinned(1));
  };
  CHECK_THROWS(make("f16", 1, 1, 1, 0), InputError, "f32, bf16 and int8");
  CHECK_THROWS(make("f32", 0, 1, 1, 0), InputError, "m is 0");
  CHECK_THROWS(make("f32", 1, -3, 1, 0), InputError, "n is -3");
  CHECK_THROWS(make("f32", 1, 1, int64_t{1} << 40, 0), InputError, "k is");
  CHECK_THROWS(make("f32", 1 << 20, 1 << 20, 1, 0), InputError, "more than 1 GiB");
  CHECK_THROWS(make("int8", 1, 1, 1, -1), InputError, "weight_bytes");
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
