#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "cpu/isa.h"
#include "cpu/peak.h"
#include "kernels/catalog.h"
#include "kernels/gemm/problem.h"

// Times every kernel of the family that this machine may run, on one core:
//
//   bench [SUBSTRING of kernel names] [SECONDS a kernel and shape] [MxNxK ...]
//
// Kernels take turns, and every call gets other weights, 64 MB of them in all, because a model's layers come
// from memory too. The minimum is the machine's answer, the median shows its mood. Before a kernel is timed
// its answer is checked: exit status 1 when it is wrong.
namespace encast::testing {
namespace {

constexpr double kWeightBytes = 64e6;

struct Shape {
  int64_t m, n, k;
};

struct Timing {
  const KernelInfo* kernel;
  double peak;
  std::vector<double> seconds;
  double spent;
};

GemmOperands operands_of(const KernelInfo& kernel) {
  const std::string_view op = kernel.op;
  return op == "gemm_f32" ? GemmOperands::f32 : op == "gemm_bf16" ? GemmOperands::bf16 : GemmOperands::q8s8;
}

// What this thread has run for: time that other programs had the core is not the kernel's.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Operations a second of the level's own instruction for the operands, or 0 where nobody has a loop for it.
double peak_of(const KernelInfo& kernel) {
  const std::string_view dtype = operands_of(kernel) == GemmOperands::f32    ? "f32"
                                 : operands_of(kernel) == GemmOperands::bf16 ? "bf16"
                                                                             : "int8";
  for (const PeakProbe& probe : peak_probes()) {
    if (probe.dtype != dtype || probe.isa != kernel.isa) continue;
    constexpr int64_t kPasses = 200'000;
    double best = 0;
    for (int repeat = 0; repeat < 8; ++repeat) {
      const double start = thread_seconds();
      probe.run(kPasses);
      best = std::max(best, static_cast<double>(probe.ops * kPasses) / (thread_seconds() - start));
    }
    return best;
  }
  return 0;
}

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<uint8_t, AlignedFree>;

// One product and copies of its weights.
class Workload {
 public:
  Workload(GemmOperands operands, const Shape& shape)
      : shape_(shape),
        problem_(operands, {.m = shape.m, .n = shape.n, .k = shape.k, .bias = true}),
        c_(static_cast<float*>(
            std::aligned_alloc(64, static_cast<size_t>((shape.m * shape.n * 4 + 63) / 64 * 64)))) {
    args_ = problem_.args(c_.get(), shape.n);
    const auto bytes = static_cast<size_t>(gemm_packed_bytes(operands, shape.n, shape.k));
    const auto copies = static_cast<size_t>(std::max(1.0, kWeightBytes / static_cast<double>(bytes)));
    for (size_t i = 0; i < copies; ++i) {
      weights_.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(64, bytes)));
      std::memcpy(weights_.back().get(), args_.w, bytes);
    }
  }

  double run(GemmFn fn) {
    next_ = (next_ + 1) % weights_.size();
    args_.w = weights_[next_].get();
    const double start = thread_seconds();
    fn(args_, 0, shape_.m, 0, (shape_.n + kPanel - 1) / kPanel);
    return thread_seconds() - start;
  }

  // The first and the last row, which are of different tiles when there are many.
  bool right(const KernelInfo& kernel) {
    run(reinterpret_cast<GemmFn>(kernel.fn));
    const bool fma_in_order = std::string_view(kernel.arithmetic) == "bf16_fma";
    for (const int64_t row : {int64_t{0}, shape_.m - 1}) {
      const GemmReference expected = problem_.reference_of_row(row, fma_in_order);
      for (int64_t j = 0; j < shape_.n; ++j) {
        const double c = c_.get()[row * shape_.n + j];
        const auto at = static_cast<size_t>(j);
        if (!(std::fabs(c - expected.c[at]) <= expected.bound[at])) return false;
      }
    }
    return true;
  }

 private:
  Shape shape_;
  Problem problem_;
  std::unique_ptr<float, AlignedFree> c_;
  GemmArgs args_;
  std::vector<AlignedBytes> weights_;
  size_t next_ = 0;
};

bool bench_shape(const Shape& shape, std::vector<Timing>& timings, double seconds) {
  std::printf("%ld x %ld x %ld\n", shape.m, shape.n, shape.k);
  bool all_right = true;
  for (const GemmOperands operands : {GemmOperands::f32, GemmOperands::bf16, GemmOperands::q8s8}) {
    std::vector<Timing*> chosen;
    for (Timing& timing : timings) {
      if (operands_of(*timing.kernel) == operands) chosen.push_back(&timing);
    }
    if (chosen.empty()) continue;
    Workload workload(operands, shape);
    for (Timing* timing : chosen) {
      timing->seconds.clear();
      timing->spent = 0;
      if (!workload.right(*timing->kernel)) {
        std::printf("  %-44s WRONG\n", timing->kernel->name);
        all_right = false;
      }
    }
    // Rounds of one call each; a kernel drops out when it has had its time.
    for (bool busy = true; busy;) {
      busy = false;
      for (Timing* timing : chosen) {
        if (timing->spent > seconds) continue;
        timing->seconds.push_back(workload.run(reinterpret_cast<GemmFn>(timing->kernel->fn)));
        timing->spent += timing->seconds.back();
        busy = true;
      }
    }
    for (Timing* timing : chosen) {
      std::vector<double>& times = timing->seconds;
      std::sort(times.begin(), times.end());
      const double operations =
          2.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) * static_cast<double>(shape.k);
      const double best = times.front(), median = times[times.size() / 2];
      const double weights = static_cast<double>(gemm_packed_bytes(operands, shape.n, shape.k));
      std::printf("  %-44s %9.1f us (median %9.1f) %7.1f GFLOP/s %5.1f GB/s of weights", timing->kernel->name,
                  best * 1e6, median * 1e6, operations / best / 1e9, weights / best / 1e9);
      if (timing->peak > 0) {
        std::printf("  %.2f of peak (median %.2f)", operations / best / timing->peak,
                    operations / median / timing->peak);
      }
      std::printf("\n");
    }
  }
  return all_right;
}

int run_bench(int argc, char** argv) {
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  std::vector<Shape> shapes;
  for (int i = 3; i < argc; ++i) {
    Shape shape;
    if (std::sscanf(argv[i], "%ldx%ldx%ld", &shape.m, &shape.n, &shape.k) != 3 || shape.m < 1 ||
        shape.n < 1 || shape.k < 1) {
      std::fprintf(stderr,
                   "%s is no shape: give rows, columns and depth as MxNxK, for instance 128x768x3072\n",
                   argv[i]);
      return 2;
    }
    shapes.push_back(shape);
  }
  if (shapes.empty())
    shapes = {{1024, 768, 768},  {1024, 2304, 768}, {1024, 3072, 768},
              {1024, 768, 3072}, {32, 2304, 768},   {1, 2304, 768}};
  std::vector<Timing> timings;
  for (const KernelInfo& kernel : all_kernels()) {
    if (std::string_view(kernel.family) != "gemm") continue;
    if (std::string_view(kernel.name).find(wanted) == std::string_view::npos) continue;
    if (!isa_allowed(kernel.isa)) {
      std::printf("skipped: %s\n", kernel.name);
      continue;
    }
    timings.push_back({&kernel, peak_of(kernel), {}, 0});
    std::printf("%s: peak %.1f GFLOP/s\n", kernel.name, timings.back().peak / 1e9);
  }
  bool all_right = true;
  for (const Shape& shape : shapes) all_right = bench_shape(shape, timings, seconds) && all_right;
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace encast::testing

int main(int argc, char** argv) { return encast::testing::run_bench(argc, argv); }
