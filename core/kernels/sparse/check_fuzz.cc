#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/catalog.h"
#include "kernels/sparse/check.h"

// Any bytes as the arrays of a sparse weight: the check refuses them, or every kernel that runs here stays
// within them, which the sanitizers see, and all give the same bits.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace encast;
  size_t at = 0;
  const auto byte = [&]() -> int64_t { return at < size ? data[at++] : 0; };
  const int64_t n = 1 + byte() % 70, k = 1 + byte() % 40, m = 1 + byte() % 70, groups = 1 + byte() % 64;
  std::vector<int32_t> starts(static_cast<size_t>(sparse_blocks(n) + 1));
  // Mostly small steps, so that some weights pass; now and then any number.
  int32_t last = 0;
  for (int32_t& start : starts) {
    const int64_t step = byte();
    if (step == 255) {
      const uint32_t any = static_cast<uint32_t>(byte() << 24 | byte() << 16 | byte() << 8 | byte());
      std::memcpy(&last, &any, sizeof last);
    } else if (&start != starts.data() && step < 4 && last < groups) {
      last += static_cast<int32_t>(step);
    }
    start = last;
  }
  std::vector<uint16_t> columns(static_cast<size_t>(groups * kGroupInputs));
  for (uint16_t& column : columns) {
    const int64_t low = byte();
    column = static_cast<uint16_t>(low < 250 ? low % (k + 1) : low << 8 | byte());
  }
  std::vector<int8_t> values(static_cast<size_t>(groups * kBlockOutputs * kGroupInputs));
  for (int8_t& value : values) value = static_cast<int8_t>(byte());
  const SparseWeight w{values.data(), columns.data(), starts.data()};
  if (!sparse_problem(w, groups, n, k).empty()) return 0;

  const auto padded = static_cast<size_t>(round_up(n, kPanel));
  std::vector<uint8_t> a(static_cast<size_t>(m * round_up(k, kGroupInputs)));
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<uint8_t>(37 * i + i / 251);
  const std::vector<float> a_scale(static_cast<size_t>(m), 0.5f), w_scale(padded, 0.25f);
  const std::vector<int32_t> a_zero(static_cast<size_t>(m), 1), colsum(padded, 2);
  std::vector<float> first;
  void* const scratch = std::aligned_alloc(64, static_cast<size_t>(round_up(sparse_scratch_bytes(k), 64)));
  for (const KernelInfo& kernel : all_kernels()) {
    if (std::strcmp(kernel.op, "sparse_q8s8") != 0 || !isa_allowed(kernel.isa)) continue;
    std::vector<float> c(static_cast<size_t>(m * n));
    GemmArgs product{.m = m, .n = n, .k = k, .a = a.data(), .a_stride = round_up(k, kGroupInputs)};
    product.a_scale = a_scale.data();
    product.a_zero = a_zero.data();
    product.w_scale = w_scale.data();
    product.w_colsum = colsum.data();
    product.c = c.data();
    product.c_stride = n;
    reinterpret_cast<SparseFn>(kernel.fn)({product, w, static_cast<std::byte*>(scratch)}, 0, m, 0,
                                          round_up(n, kPanel) / kPanel);
    if (first.empty()) first = c;
    if (std::memcmp(first.data(), c.data(), c.size() * sizeof(float)) != 0) std::abort();
  }
  std::free(scratch);
  return 0;
}
