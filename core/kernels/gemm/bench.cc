#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cpu/isa.h"
#include "cpu/peak.h"
#include "kernels/catalog.h"
#include "kernels/gemm/problem.h"

// Times every kernel of the family that this machine may run:
//
//   bench [SUBSTRING of kernel names] [SECONDS a kernel and shape] [MxNxK ...] [--OPTION=VALUE ...]
//
//   --threads=T           1
//   --split=rows|panels   rows: each thread has M rows of its own and all panels of the same weights;
//                         panels: M rows in all, and each thread has its part of the panels
//   --weights-mb=MB       64: copies of the weights that calls take in turn. A model's layers come from L3
//                         or from memory too: 8 stay in L3, 512 do not
//   --c=f32|bf16          outputs
//   --activation=gelu     none, gelu, coarse_gelu or relu
//
// Kernels take turns. A measurement is a run of calls that go through the copies; the minimum is the
// machine's answer, the median shows its mood. Before a kernel is timed its answer is checked: exit status 1
// when it is wrong.
namespace encast::testing {
namespace {

// A measurement is about so long, because reading the clock takes some tenths of a microsecond.
constexpr double kMeasurementSeconds = 100e-6;

enum class Split : uint8_t { rows, panels };

struct Options {
  std::string_view wanted;
  double seconds = 1.0;
  int threads = 1;
  Split split = Split::rows;
  double weights_mb = 64;
  Activation activation = Activation::none;
  bool coarse = false, bf16_out = false;
};

struct Shape {
  int64_t m, n, k;
};

struct Timing {
  const KernelInfo* kernel;
  const PeakProbe* probe;
  std::vector<double> seconds, peaks;
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

// The loop of the level's own instruction for the operands, or null where nobody has one.
const PeakProbe* probe_of(const KernelInfo& kernel) {
  const std::string_view dtype = operands_of(kernel) == GemmOperands::f32    ? "f32"
                                 : operands_of(kernel) == GemmOperands::bf16 ? "bf16"
                                                                             : "int8";
  for (const PeakProbe& probe : peak_probes()) {
    if (probe.dtype == dtype && probe.isa == kernel.isa) return &probe;
  }
  return nullptr;
}

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<uint8_t, AlignedFree>;

// Threads that wait for each other, spinning: a sleeping one would come late.
class Team {
 public:
  explicit Team(int threads) : threads_(threads), seconds_(static_cast<size_t>(threads)) {
    for (int thread = 1; thread < threads; ++thread) others_.emplace_back([this, thread] { serve(thread); });
  }
  ~Team() {
    work_ = nullptr;
    wait();
    for (std::thread& thread : others_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // Of work(thread) in the thread that takes longest.
  double seconds(const std::function<void(int)>& work) {
    work_ = &work;
    wait();
    timed(0);
    wait();
    return *std::max_element(seconds_.begin(), seconds_.end());
  }

  void wait() {
    const int round = round_.load();
    if (waiting_.fetch_add(1) + 1 == threads_) {
      waiting_.store(0);
      round_.store(round + 1);
    }
    while (round_.load() == round) {
    }
  }

 private:
  void serve(int thread) {
    for (;;) {
      wait();
      if (work_ == nullptr) return;
      timed(thread);
      wait();
    }
  }
  void timed(int thread) {
    const double start = thread_seconds();
    (*work_)(thread);
    seconds_[static_cast<size_t>(thread)] = thread_seconds() - start;
  }

  const int threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::vector<double> seconds_;
  std::atomic<int> waiting_{0}, round_{0};
  std::vector<std::thread> others_;
};

// One product and copies of its weights.
class Workload {
 public:
  Workload(GemmOperands operands, const Shape& shape, const Options& options, Team& team)
      : rows_split_(options.split == Split::rows),
        shape_{rows_split_ ? shape.m * team.threads() : shape.m, shape.n, shape.k},
        problem_(operands, {.m = shape_.m,
                            .n = shape.n,
                            .k = shape.k,
                            .bias = true,
                            .activation = options.activation,
                            .coarse = options.coarse}),
        c_(static_cast<float*>(
            std::aligned_alloc(64, static_cast<size_t>(shape_.m * (shape.n + kPanel) * 4 / 64 * 64)))),
        bf16_out_(options.bf16_out),
        team_(team) {
    args_ = problem_.args(c_.get(), shape.n);
    const auto bytes = static_cast<size_t>(gemm_packed_bytes(operands, shape.n, shape.k));
    packed_panel_ = static_cast<int64_t>(bytes) / ((shape.n + kPanel - 1) / kPanel);
    const auto copies =
        static_cast<size_t>(std::max(1.0, options.weights_mb * 1e6 / static_cast<double>(bytes)));
    for (size_t i = 0; i < copies; ++i) {
      weights_.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(64, bytes)));
      std::memcpy(weights_.back().get(), args_.w, bytes);
    }
  }

  // Of all threads together.
  double operations() const {
    return 2.0 * static_cast<double>(shape_.m) * static_cast<double>(shape_.n) *
           static_cast<double>(shape_.k);
  }

  // Seconds of one call, the mean of `calls`.
  double run(GemmFn fn, int calls) { return run(fn, calls, bf16_out_); }

  // The first and the last row, which are of different tiles when there are many, in f32.
  bool right(const KernelInfo& kernel) {
    run(reinterpret_cast<GemmFn>(kernel.fn), 1, false);
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
  double run(GemmFn fn, int calls, bool bf16_out) {
    // There is room for padded rows of either type.
    args_.c = bf16_out ? nullptr : c_.get();
    args_.c_bf16 = bf16_out ? reinterpret_cast<uint16_t*>(c_.get()) : nullptr;
    args_.c_stride = bf16_out ? (shape_.n + kPanel - 1) / kPanel * kPanel : shape_.n;
    const double seconds = team_.seconds([&](int thread) { work(fn, calls, thread); });
    next_ = (next_ + static_cast<size_t>(calls)) % weights_.size();
    return seconds / calls;
  }

  void work(GemmFn fn, int calls, int thread) {
    const int64_t panels = (shape_.n + kPanel - 1) / kPanel;
    const auto part = [&](int64_t whole, bool split, int end) {
      return split ? whole * (thread + end) / team_.threads() : whole * end;
    };
    GemmArgs args = args_;
    const int64_t next_at = part(panels, !rows_split_, 0) * packed_panel_;
    for (int call = 0; call < calls; ++call) {
      const auto copy = [&](int ahead) {
        return weights_[(next_ + static_cast<size_t>(call + ahead)) % weights_.size()].get();
      };
      args.w = copy(0);
      args.next_w = copy(1) + next_at;
      args.next_w_bytes = packed_panel_;
      fn(args, part(shape_.m, rows_split_, 0), part(shape_.m, rows_split_, 1), part(panels, !rows_split_, 0),
         part(panels, !rows_split_, 1));
      // The next product would read what all threads have written.
      if (!rows_split_) team_.wait();
    }
  }

  const bool rows_split_;
  Shape shape_;
  Problem problem_;
  std::unique_ptr<float, AlignedFree> c_;
  const bool bf16_out_;
  Team& team_;
  GemmArgs args_;
  int64_t packed_panel_;
  std::vector<AlignedBytes> weights_;
  size_t next_ = 0;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Operations a second of the level's own instruction, on all threads.
double peak_of(const Timing& timing, Team& team) {
  constexpr int64_t kPasses = 50'000;
  if (timing.probe == nullptr) return 0;
  const double seconds = team.seconds([&](int) { timing.probe->run(kPasses); });
  return static_cast<double>(timing.probe->ops * kPasses * team.threads()) / seconds;
}

bool bench_shape(const Shape& shape, std::vector<Timing>& timings, const Options& options, Team& team) {
  std::printf("%ld x %ld x %ld\n", shape.m, shape.n, shape.k);
  bool all_right = true;
  for (const GemmOperands operands : {GemmOperands::f32, GemmOperands::bf16, GemmOperands::q8s8}) {
    std::vector<Timing*> chosen;
    for (Timing& timing : timings) {
      if (operands_of(*timing.kernel) == operands) chosen.push_back(&timing);
    }
    if (chosen.empty()) continue;
    Workload workload(operands, shape, options, team);
    for (Timing* timing : chosen) {
      timing->seconds.clear();
      timing->peaks.clear();
      timing->spent = 0;
      if (!workload.right(*timing->kernel)) {
        std::printf("  %-44s WRONG\n", timing->kernel->name);
        all_right = false;
      }
    }
    // Rounds of one measurement each and one of the peak, because clocks wander; a kernel drops out when it
    // has had its time.
    for (bool busy = true; busy;) {
      busy = false;
      for (Timing* timing : chosen) {
        if (timing->spent > options.seconds) continue;
        const int calls = timing->seconds.empty()
                              ? 1
                              : std::max(1, static_cast<int>(kMeasurementSeconds / timing->seconds.front()));
        timing->seconds.push_back(workload.run(reinterpret_cast<GemmFn>(timing->kernel->fn), calls));
        timing->spent += timing->seconds.back() * calls;
        timing->peaks.push_back(peak_of(*timing, team));
        busy = true;
      }
    }
    for (Timing* timing : chosen) {
      const double best = *std::min_element(timing->seconds.begin(), timing->seconds.end());
      const double usual = median(timing->seconds), operations = workload.operations();
      const double weights = static_cast<double>(gemm_packed_bytes(operands, shape.n, shape.k));
      std::printf("  %-44s %9.1f us (median %9.1f) %7.1f GFLOP/s %5.1f GB/s of weights", timing->kernel->name,
                  best * 1e6, usual * 1e6, operations / best / 1e9, weights / best / 1e9);
      if (timing->probe != nullptr) {
        std::printf("  %.2f of peak (median %.2f)",
                    operations / best / *std::max_element(timing->peaks.begin(), timing->peaks.end()),
                    operations / usual / median(timing->peaks));
      }
      std::printf("\n");
    }
  }
  return all_right;
}

// Sets the option that `text` names; false when there is none such or its value is not accepted.
bool read_option(const char* text, Options& options) {
  const std::string_view option = text;
  const auto number = [&](std::string_view name, double least, double most, double& value) {
    if (!option.starts_with(name)) return false;
    char* end = nullptr;
    value = std::strtod(text + name.size(), &end);
    return end != text + name.size() && *end == 0 && value >= least && value <= most;
  };
  double threads = 0;
  if (number("--threads=", 1, 1024, threads)) {
    options.threads = static_cast<int>(threads);
    return true;
  }
  if (number("--weights-mb=", 0, 1e5, options.weights_mb)) return true;
  if (option == "--c=f32" || option == "--c=bf16") {
    options.bf16_out = option == "--c=bf16";
    return true;
  }
  if (option == "--split=rows" || option == "--split=panels") {
    options.split = option == "--split=rows" ? Split::rows : Split::panels;
    return true;
  }
  struct Named {
    std::string_view option;
    Activation activation;
    bool coarse;
  };
  for (const Named& named : {Named{"--activation=none", Activation::none, false},
                             {"--activation=gelu", Activation::gelu, false},
                             {"--activation=coarse_gelu", Activation::gelu, true},
                             {"--activation=relu", Activation::relu, false}}) {
    if (option != named.option) continue;
    options.activation = named.activation;
    options.coarse = named.coarse;
    return true;
  }
  return false;
}

int run_bench(int argc, char** argv) {
  Options options;
  std::vector<Shape> shapes;
  int position = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).starts_with("--")) {
      if (read_option(argv[i], options)) continue;
      std::fprintf(stderr, "%s is no option of the benchmark: the head of bench.cc has the list\n", argv[i]);
      return 2;
    }
    if (++position <= 2) {
      if (position == 1) options.wanted = argv[i];
      if (position == 2) options.seconds = std::atof(argv[i]);
      continue;
    }
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
    if (std::string_view(kernel.name).find(options.wanted) == std::string_view::npos) continue;
    if (!isa_allowed(kernel.isa)) {
      std::printf("skipped: %s\n", kernel.name);
      continue;
    }
    timings.push_back({&kernel, probe_of(kernel), {}, {}, 0});
  }
  Team team(options.threads);
  bool all_right = true;
  for (const Shape& shape : shapes) all_right = bench_shape(shape, timings, options, team) && all_right;
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace encast::testing

int main(int argc, char** argv) { return encast::testing::run_bench(argc, argv); }
