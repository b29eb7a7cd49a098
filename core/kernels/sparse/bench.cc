#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/peak.h"
#include "kernels/catalog.h"
#include "kernels/gemm/reference.h"
#include "kernels/sparse/pack.h"
#include "testing/random.h"

// The products of DistilBERT and MiniLM on one thread, dense and sparse by turns: medians of their ratio, and
// the part of the peak that the products which are left reach.
namespace encast::testing {
namespace {

constexpr int kRounds = 15;
// The bytes of MiniLM's products. A weight is copied until it has as many, so that it comes from where a
// model's would: from behind the second-level cache.
constexpr int64_t kDenseBytes = 10 << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

struct Aligned {
  explicit Aligned(int64_t bytes)
      : data(static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))))) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  std::byte* const data;
};

template <class F>
double seconds_of(F f) {
  int repeats = 1;
  for (;; repeats *= 2) {
    const double begin = now();
    for (int i = 0; i < repeats; ++i) f();
    const double took = now() - begin;
    if (took > 2e-3) return took / repeats;
  }
}

void measure(int64_t m, int64_t n, int64_t k, double density, double peak) {
  Rng rng(9);
  std::vector<int8_t> w(static_cast<size_t>(n * k));
  for (int64_t block = 0; block < n; block += kBlockOutputs) {
    for (int64_t column = 0; column < k; ++column) {
      if (rng.unit() >= density) continue;
      for (int64_t output = block; output < block + kBlockOutputs; ++output) {
        w[static_cast<size_t>(output * k + column)] = static_cast<int8_t>(rng.integer(1, 127));
      }
    }
  }
  const int64_t bytes = gemm_packed_bytes(GemmOperands::q8s8, n, k);
  const int64_t copies = round_up(kDenseBytes, bytes) / bytes;
  const std::vector<PackedSparse> sparse(static_cast<size_t>(copies), pack_sparse(w.data(), n, k));
  const Aligned dense(copies * bytes), scratch(sparse_scratch_bytes(k)), a(m * k), c(m * n * 4);
  for (int64_t copy = 0; copy < copies; ++copy)
    gemm_pack(GemmOperands::q8s8, w.data(), n, k, dense.data + copy * bytes);
  std::fill(a.data, a.data + m * k, std::byte{77});
  const std::vector<float> a_scale(static_cast<size_t>(m), 0.01f), w_scale(static_cast<size_t>(n), 0.01f);
  const std::vector<int32_t> a_zero(static_cast<size_t>(m), 128), colsum(static_cast<size_t>(n), 5);
  GemmArgs args{.m = m, .n = n, .k = k, .a = a.data, .a_stride = k};
  args.a_scale = a_scale.data();
  args.a_zero = a_zero.data();
  args.w_scale = w_scale.data();
  args.w_colsum = colsum.data();
  args.c = reinterpret_cast<float*>(c.data);
  args.c_stride = n;
  const auto multiply = reinterpret_cast<GemmFn>(select_kernel("gemm_q8s8", "s8", m)->fn);
  const auto skip = reinterpret_cast<SparseFn>(select_kernel("sparse_q8s8", "s8", m)->fn);
  const int64_t panels = round_up(n, kPanel) / kPanel;
  std::vector<double> ratios, times;
  int64_t copy = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double dense_s = seconds_of([&] {
      GemmArgs own = args;
      copy = (copy + 1) % copies;
      own.w = dense.data + copy * bytes;
      multiply(own, 0, m, 0, panels);
    });
    const double sparse_s = seconds_of([&] {
      copy = (copy + 1) % copies;
      skip({args, sparse[static_cast<size_t>(copy)].weight(), scratch.data}, 0, m, 0, panels);
    });
    ratios.push_back(dense_s / sparse_s);
    times.push_back(sparse_s);
  }
  const double left = 2.0 * static_cast<double>(m * sparse[0].groups() * kBlockOutputs * kGroupInputs);
  std::printf(
      "%5ld x %4ld x %4ld  %3.0f %% zero  %8.1f us  %5.2f times dense  %4.2f of the peak on what is left  "
      "%s\n",
      static_cast<long>(m), static_cast<long>(n), static_cast<long>(k), 100 * (1 - density),
      1e6 * median(times), median(ratios), left / median(times) / peak,
      select_kernel("sparse_q8s8", "s8", m)->name);
  std::fflush(stdout);
}

}  // namespace
}  // namespace encast::testing

int main() {
  using namespace encast;
  using encast::testing::measure;
  const double peak = peak_ops_per_second("int8", 1, 0.5);
  std::printf("peak %.0f Gop/s on one thread\n", peak / 1e9);
  for (const double zero : {0.5, 0.6, 0.7, 0.8, 0.9, 0.95}) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{768, 768}, {3072, 768}, {768, 3072}, {1152, 384}, {384, 1536}}) {
      for (const int64_t m : {8, 16, 32, 128, 1024}) measure(m, n, k, 1 - zero, peak);
    }
  }
}
