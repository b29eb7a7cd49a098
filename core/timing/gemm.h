#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "kernels/catalog.h"
#include "kernels/gemm/reference.h"
#include "parallel/team.h"

// Times the kernels of the gemm family on one product, as a model would run it: operands of random numbers,
// rows or panels split over a team of threads, and other weights in every call. Callers of one timer take
// turns.
namespace encast {

class GemmTimer {
 public:
  // c = a @ w + bias with a[m, k] and w[n, k] of "f32", "bf16" or "int8". Calls go through copies of the
  // weights that take `weight_bytes` together (at least one copy), because a model's layers come from memory
  // too. Throws InputError for sizes below 1 or operands beyond 1 GiB, ResourceError where memory or threads
  // are short.
  GemmTimer(std::string_view dtype, int64_t m, int64_t n, int64_t k, int64_t weight_bytes,
            const TeamOptions& team);
  ~GemmTimer();

  // Those that this machine may run, in the order of the catalog. None other is accepted below.
  const std::vector<const KernelInfo*>& kernels() const { return kernels_; }

  // Bytes of weights that one call reads.
  int64_t weight_bytes() const { return packed_bytes_; }

  // Whether the first, the middle and the last row are within their bound of the reference.
  bool check(const KernelInfo& kernel);

  // Seconds of a call, the mean of so many in a row: processor time of a single thread, wall time of several.
  double run(const KernelInfo& kernel, int64_t calls);

 private:
  struct Operands;

  void call_many(const KernelInfo& kernel, int64_t calls, int thread);
  double time(const KernelInfo& kernel, int64_t calls);

  GemmOperands operands_;
  int64_t m_, n_, k_, packed_bytes_;
  Team team_;
  std::vector<const KernelInfo*> kernels_;
  std::unique_ptr<Operands> data_;
  std::mutex mutex_;  // of the team and the answer
};

}  // namespace encast
