#include "timing/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"
#include "parallel/partition.h"
#include "timing/rounds.h"

namespace encast {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 30;  // of an operand, and of the copies of the weights

GemmOperands operands_named(std::string_view dtype) {
  if (dtype == "f32") return GemmOperands::f32;
  if (dtype == "bf16") return GemmOperands::bf16;
  if (dtype == "int8") return GemmOperands::q8s8;
  throw InputError("dtype is \"" + std::string(dtype) + "\"; products of f32, bf16 and int8 can be timed");
}

const char* op_of(GemmOperands operands) {
  return operands == GemmOperands::f32    ? "gemm_f32"
         : operands == GemmOperands::bf16 ? "gemm_bf16"
                                          : "gemm_q8s8";
}

int64_t element_bytes(GemmOperands operands) {
  return operands == GemmOperands::f32 ? 4 : operands == GemmOperands::bf16 ? 2 : 1;
}

// Rows of a in elements: k up to the contract's multiple, and to whole cache lines as in the executor's
// arena.
int64_t stride_of(GemmOperands operands, int64_t k) { return round_up(k, 64 / element_bytes(operands)); }

void check_sizes(GemmOperands operands, int64_t m, int64_t n, int64_t k, int64_t weight_bytes) {
  constexpr int64_t kMaxSize = int64_t{1} << 24;
  for (const auto& [name, size] : {std::pair{"m", m}, {"n", n}, {"k", k}})
    if (size < 1 || size > kMaxSize)
      throw InputError(std::string(name) + " is " + std::to_string(size) + "; 1 to " +
                       std::to_string(kMaxSize) + " are accepted");
  const int64_t element = element_bytes(operands);
  if (m * stride_of(operands, k) * element > kMaxBytes ||
      round_up(n, kPanel) * round_up(k, 4) * 4 > kMaxBytes || m * n * 4 > kMaxBytes)
    throw InputError("a product of " + std::to_string(m) + " x " + std::to_string(n) + " x " +
                     std::to_string(k) + " has a matrix of more than 1 GiB; smaller ones can be timed");
  if (weight_bytes < 0 || weight_bytes > kMaxBytes)
    throw InputError("weight_bytes is " + std::to_string(weight_bytes) + "; up to 1 GiB is accepted");
}

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<std::byte[], Free>;

Bytes allocate(int64_t bytes) {
  Bytes memory(static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64)))));
  if (memory == nullptr)
    throw ResourceError("no memory for an operand of " + std::to_string(bytes) + " bytes; free some");
  return memory;
}

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  float uniform(float low, float high) {
    return low + (high - low) * (static_cast<float>(bits() >> 40) * 0x1p-24f);
  }

 private:
  uint64_t state_ = 1;
};

// Random numbers that no kernel can be quicker with: no zeros but in padding, nothing denormal.
void fill(Random& random, GemmOperands operands, std::byte* to, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    if (operands == GemmOperands::q8s8) {
      to[i] = static_cast<std::byte>(random.bits());
      continue;
    }
    const float value = random.uniform(0.5f, 1.0f) * (random.bits() % 2 == 0 ? 1.0f : -1.0f);
    const auto size = static_cast<size_t>(element_bytes(operands));
    std::byte raw[4];
    std::memcpy(raw, &value, 4);
    std::memcpy(to + i * static_cast<int64_t>(size), raw + 4 - size, size);  // bf16 is the upper half
  }
}

}  // namespace

struct GemmTimer::Operands {
  Bytes a, w, c;
  std::vector<Bytes> packed;
  std::vector<float> a_scale, w_scale, bias;
  std::vector<int32_t> a_zero, w_colsum;
  GemmArgs args;
  size_t next = 0;  // of the copies of the weights
};

GemmTimer::GemmTimer(std::string_view dtype, int64_t m, int64_t n, int64_t k, int64_t weight_bytes,
                     const TeamOptions& team)
    : operands_(operands_named(dtype)),
      m_(m),
      n_(n),
      k_(k),
      packed_bytes_((check_sizes(operands_, m, n, k, weight_bytes), gemm_packed_bytes(operands_, n, k))),
      team_(team),
      data_(std::make_unique<Operands>()) {
  for (const KernelInfo& kernel : all_kernels())
    if (std::string_view(kernel.op) == op_of(operands_) && isa_allowed(kernel.isa))
      kernels_.push_back(&kernel);
  Operands& data = *data_;
  Random random;
  const int64_t element = element_bytes(operands_), stride = stride_of(operands_, k);
  data.a = allocate(m * stride * element);
  data.w = allocate(n * k * element);
  data.c = allocate(m * n * 4);
  fill(random, operands_, data.a.get(), m * stride);
  fill(random, operands_, data.w.get(), n * k);
  std::memset(data.c.get(), 0, static_cast<size_t>(m * n * 4));
  const auto columns = static_cast<size_t>(round_up(n, kPanel));
  data.bias.resize(columns);
  for (int64_t j = 0; j < n; ++j) data.bias[static_cast<size_t>(j)] = random.uniform(-1, 1);
  GemmArgs& args = data.args;
  args = {.m = m, .n = n, .k = k, .a = data.a.get(), .a_stride = stride};
  args.bias = data.bias.data();
  args.c = reinterpret_cast<float*>(data.c.get());
  args.c_stride = n;
  if (operands_ == GemmOperands::q8s8) {
    data.w_scale.resize(columns);
    data.w_colsum.resize(columns);
    const auto* w = reinterpret_cast<const int8_t*>(data.w.get());
    for (int64_t j = 0; j < n; ++j) {
      data.w_scale[static_cast<size_t>(j)] = random.uniform(0.001f, 0.02f);
      for (int64_t i = 0; i < k; ++i) data.w_colsum[static_cast<size_t>(j)] += w[j * k + i];
    }
    for (int64_t i = 0; i < m; ++i) {
      data.a_scale.push_back(random.uniform(0.001f, 0.02f));
      data.a_zero.push_back(static_cast<int32_t>(random.bits() % 256));
    }
    args.a_scale = data.a_scale.data();
    args.a_zero = data.a_zero.data();
    args.w_scale = data.w_scale.data();
    args.w_colsum = data.w_colsum.data();
  }
  const int64_t copies = std::max(weight_bytes / packed_bytes_, int64_t{1});
  for (int64_t i = 0; i < copies; ++i) {
    data.packed.push_back(allocate(packed_bytes_));
    if (i == 0)
      gemm_pack(operands_, data.w.get(), n, k, data.packed[0].get());
    else
      std::memcpy(data.packed.back().get(), data.packed[0].get(), static_cast<size_t>(packed_bytes_));
  }
}

GemmTimer::~GemmTimer() = default;

void GemmTimer::call_many(const KernelInfo& kernel, int64_t calls, int thread) {
  const auto fn = reinterpret_cast<GemmFn>(kernel.fn);
  GemmArgs args = data_->args;
  const Tile tile =
      split_product({0, m_}, (n_ + kPanel - 1) / kPanel, thread, team_.size(), kernel.isa == Isa::amx);
  const bool idle = tile.rows.begin >= tile.rows.end || tile.panels.begin >= tile.panels.end;
  for (int64_t i = 0; i < calls; ++i) {
    args.w = data_->packed[(data_->next + static_cast<size_t>(i)) % data_->packed.size()].get();
    if (!idle) fn(args, tile.rows.begin, tile.rows.end, tile.panels.begin, tile.panels.end);
    team_.barrier();  // as between the steps of a plan
  }
}

double GemmTimer::run(const KernelInfo& kernel, int64_t calls) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return time(kernel, calls);
}

double GemmTimer::time(const KernelInfo& kernel, int64_t calls) {
  double elapsed = 0;
  auto work = [&](int thread) {
    const auto now = team_.size() == 1 ? &thread_seconds : &wall_seconds;
    team_.barrier();
    const double start = now();
    call_many(kernel, calls, thread);
    if (thread == 0) elapsed = now() - start;
  };
  team_.run(work);
  data_->next = (data_->next + static_cast<size_t>(calls)) % data_->packed.size();
  return elapsed / static_cast<double>(calls);
}

bool GemmTimer::check(const KernelInfo& kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const GemmArgs& all = data_->args;
  // What a kernel leaves out must not be found right because another one wrote it before.
  std::fill_n(all.c, m_ * n_, std::numeric_limits<float>::quiet_NaN());
  time(kernel, 1);
  const bool fma_in_order = std::string_view(kernel.arithmetic) == "bf16_fma";
  for (const int64_t row : {int64_t{0}, m_ / 2, m_ - 1}) {
    GemmArgs one = all;
    one.m = 1;
    one.a = static_cast<const std::byte*>(all.a) + row * all.a_stride * element_bytes(operands_);
    if (one.a_scale != nullptr) one.a_scale += row;
    if (one.a_zero != nullptr) one.a_zero += row;
    const GemmReference expected = gemm_reference(operands_, one, data_->w.get(), fma_in_order);
    for (int64_t j = 0; j < n_; ++j) {
      const double c = all.c[row * n_ + j];
      const auto at = static_cast<size_t>(j);
      if (!(std::fabs(c - expected.c[at]) <= expected.bound[at])) return false;
    }
  }
  return true;
}

}  // namespace encast
