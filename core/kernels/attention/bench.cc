#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <vector>

#include "cpu/isa.h"
#include "cpu/peak.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/reference.h"
#include "kernels/catalog.h"
#include "testing/random.h"
#include "timing/rounds.h"

// Times every kernel of the family that this machine may run, on one core:
//
//   bench [SUBSTRING of kernel names] [SECONDS a kernel and shape] [SEQSxLENxHEADSxHEADDIM[xREACH|xd|xs] ...]
//
// A call is a whole batch: all heads of all sequences, the packing of keys and values included. Kernels take
// turns; the minimum is the machine's answer, the median shows its mood. xd: with both tables of distances,
// which the f32 kernels alone have; xs: with one pair of them for all heads. Operations are those of the
// products (with tables four of the same size), so the fraction of the product instruction's peak has
// everything else as its loss. Before a kernel is timed some of its rows are checked: exit status 1 when one
// is wrong.
namespace encast::testing {
namespace {

struct Shape {
  int64_t seqs, len, heads, head_dim, reach = 0;
  bool tables = false, shared = false;
  double operations() const {
    // Of a query the keys that it sees, at the ends of a text fewer.
    const int64_t most = reach == 0 ? len - 1 : std::min(reach, len - 1);
    return (tables ? 8.0 : 4.0) * static_cast<double>(seqs * heads * head_dim) *
           static_cast<double>(len * (2 * most + 1) - most * (most + 1));
  }
};

struct Timing {
  const KernelInfo* kernel;
  double peak;
  std::vector<double> seconds;
  double spent;
};

// Operations a second of the instruction that the kernel's products are made of, or 0 where nobody has a loop
// for it. bf16_fma multiplies in f32.
double peak_of(const KernelInfo& kernel) {
  const std::string_view arithmetic = kernel.arithmetic;
  const std::string_view dtype = arithmetic == "s8"                                     ? "int8"
                                 : arithmetic == "bf16_dp" || arithmetic == "bf16_tile" ? "bf16"
                                                                                        : "f32";
  for (const PeakProbe& probe : peak_probes()) {
    if (probe.dtype != dtype || probe.isa != kernel.isa) continue;
    constexpr int64_t kPasses = 100'000;
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

struct Free {
  void operator()(float* p) const { std::free(p); }
};

class Workload {
 public:
  explicit Workload(const Shape& shape) : shape_(shape), hidden_(shape.heads * shape.head_dim) {
    const auto rows = static_cast<size_t>(shape.seqs * shape.len), hidden = static_cast<size_t>(hidden_);
    // In large pages, as the arena's values.
    constexpr size_t kPage = size_t{2} << 20;
    const size_t floats = rows * 3 * hidden, bytes = (floats * 4 + kPage - 1) / kPage * kPage;
    qkv_.reset(static_cast<float*>(std::aligned_alloc(kPage, bytes)));
    madvise(qkv_.get(), bytes, MADV_HUGEPAGE);
    Rng rng;
    rng.fill_normal({qkv_.get(), floats});
    out_.resize(rows * hidden);
    for (int64_t s = 0; s <= shape.seqs; ++s) offsets_.push_back(static_cast<int32_t>(s * shape.len));
    scratch_.resize(
        static_cast<size_t>(attention_scratch_bytes(shape.len, shape.head_dim, shape.tables)) / 4 + 16);
    args_.qkv = qkv_.get();
    args_.qkv_stride = 3 * hidden_;
    args_.cu_seqlens = offsets_.data();
    args_.heads = static_cast<int32_t>(shape.heads);
    args_.head_dim = static_cast<int32_t>(shape.head_dim);
    args_.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
    args_.reach = shape.reach;
    if (shape.tables) {
      args_.table_columns = relative_columns(shape.len);
      args_.shared_tables = shape.shared;
      for (std::vector<float>* table : {&key_table_, &query_table_}) {
        table->resize((shape.shared ? static_cast<size_t>(shape.head_dim) : hidden) *
                      static_cast<size_t>(args_.table_columns));
        rng.fill_normal({table->data(), table->size()});
      }
      args_.key_table = key_table_.data();
      args_.query_table = query_table_.data();
    }
    args_.out = out_.data();
    args_.out_stride = hidden_;
  }

  double run(AttentionFn fn) {
    void* scratch = scratch_.data() + (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64) % 64 / 4;
    const double start = thread_seconds();
    for (int64_t s = 0; s < shape_.seqs; ++s) {
      for (int64_t h = 0; h < shape_.heads; ++h) fn(args_, s, h, 0, shape_.len, scratch);
    }
    return thread_seconds() - start;
  }

  // The first and the last query of the last head of the last sequence.
  bool right(const KernelInfo& kernel) {
    run(reinterpret_cast<AttentionFn>(kernel.fn));
    const std::string_view arithmetic = kernel.arithmetic;
    AttentionRow row;
    const int64_t first = (shape_.seqs - 1) * shape_.len;
    row.stride = args_.qkv_stride;
    row.hidden = hidden_;
    row.head = shape_.heads - 1;
    row.head_dim = shape_.head_dim;
    row.scale = args_.scale;
    row.reach = shape_.reach;
    row.key_table = args_.key_table;
    row.query_table = args_.query_table;
    row.columns = args_.table_columns;
    row.shared = args_.shared_tables;
    for (const int64_t query : {int64_t{0}, shape_.len - 1}) {
      // The block of queries and what it reaches, see spans.h.
      const int64_t block = query / 128 * 128;
      const int64_t begin = shape_.reach == 0 ? 0 : std::max<int64_t>(block - shape_.reach, 0);
      row.qkv = qkv_.get() + (first + begin) * args_.qkv_stride;
      row.len = (shape_.reach == 0 ? shape_.len : std::min(block + 128 + shape_.reach, shape_.len)) - begin;
      row.query = query - begin;
      const AttentionReference want = arithmetic == "s8" ? coded_reference(row, code_head(row))
                                                         : float_reference(row, arithmetic != "f32");
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        const double got = out_[static_cast<size_t>((first + query) * hidden_ + row.head * row.head_dim + d)];
        const auto at = static_cast<size_t>(d);
        if (!(std::fabs(got - want.out[at]) <= want.bound[at])) return false;
      }
    }
    return true;
  }

 private:
  Shape shape_;
  int64_t hidden_;
  std::unique_ptr<float, Free> qkv_;
  std::vector<float> out_, scratch_, key_table_, query_table_;
  std::vector<int32_t> offsets_;
  AttentionArgs args_;
};

bool bench_shape(const Shape& shape, std::vector<Timing> timings, double seconds) {
  if (shape.tables)
    std::erase_if(timings,
                  [](const Timing& one) { return std::string_view(one.kernel->arithmetic) != "f32"; });
  std::printf("%ld sequences of %ld tokens, %ld heads of %ld, reach %ld%s\n", shape.seqs, shape.len,
              shape.heads, shape.head_dim, shape.reach,
              shape.shared   ? ", distances of all heads"
              : shape.tables ? ", distances"
                             : "");
  Workload workload(shape);
  bool all_right = true;
  for (Timing& timing : timings) {
    timing.seconds.clear();
    timing.spent = 0;
    if (!workload.right(*timing.kernel)) {
      std::printf("  %-34s WRONG\n", timing.kernel->name);
      all_right = false;
    }
  }
  // Rounds of one call each; a kernel drops out when it has had its time.
  for (bool busy = true; busy;) {
    busy = false;
    for (Timing& timing : timings) {
      if (timing.spent > seconds) continue;
      timing.seconds.push_back(workload.run(reinterpret_cast<AttentionFn>(timing.kernel->fn)));
      timing.spent += timing.seconds.back();
      busy = true;
    }
  }
  for (Timing& timing : timings) {
    std::vector<double>& times = timing.seconds;
    std::sort(times.begin(), times.end());
    const double best = times.front(), median = times[times.size() / 2];
    std::printf("  %-34s %9.1f us (median %9.1f) %7.1f GFLOP/s", timing.kernel->name, best * 1e6,
                median * 1e6, shape.operations() / best / 1e9);
    if (timing.peak > 0) {
      std::printf("  %.2f of peak (median %.2f)", shape.operations() / best / timing.peak,
                  shape.operations() / median / timing.peak);
    }
    std::printf("\n");
  }
  return all_right;
}

int run_bench(int argc, char** argv) {
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.5;
  std::vector<Shape> shapes;
  for (int i = 3; i < argc; ++i) {
    Shape s;
    s.shared = std::string_view(argv[i]).ends_with("xs");
    s.tables = s.shared || std::string_view(argv[i]).ends_with("xd");
    if (std::sscanf(argv[i], "%ldx%ldx%ldx%ldx%ld", &s.seqs, &s.len, &s.heads, &s.head_dim, &s.reach) < 4 ||
        s.reach < 0 || s.seqs < 1 || s.len < 1 || s.heads < 1 || s.head_dim < 1 ||
        s.seqs * s.len * s.heads * s.head_dim > (1 << 28)) {
      std::fprintf(
          stderr,
          "%s is no shape: give sequences, tokens, heads and columns a head as SxLxHxD, at most 2^28 "
          "together, for instance 8x128x12x64, and xR for keys up to R away alone\n",
          argv[i]);
      return 2;
    }
    shapes.push_back(s);
  }
  if (shapes.empty()) {
    shapes = {{8, 128, 12, 64}, {8, 128, 12, 32}, {32, 32, 12, 32},
              {80, 12, 12, 32}, {6, 153, 12, 64}, {2, 512, 12, 64}};
  }
  std::vector<Timing> timings;
  for (const KernelInfo& kernel : all_kernels()) {
    if (std::string_view(kernel.family) != "attention") continue;
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
