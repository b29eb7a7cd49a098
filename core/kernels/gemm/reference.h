#pragma once
#include <cstdint>
#include <vector>

#include "kernels/gemm/gemm.h"

// The contract of gemm.h in the plainest form, in double and from weights as a matrix: what the tests and the
// benchmark hold the kernels against, and the packed layouts that artifact/pack.py writes.
namespace encast {

enum class GemmOperands : uint8_t { f32, q8s8, bf16 };

// Weights [n, k], row-major, of the operands' element (f32, s8, bf16 bits), in panels. 64-byte aligned memory
// of gemm_packed_bytes is the caller's.
int64_t gemm_packed_bytes(GemmOperands operands, int64_t n, int64_t k);
void gemm_pack(GemmOperands operands, const void* w, int64_t n, int64_t k, void* packed);

struct GemmReference {
  std::vector<double> c;  // [m, n]
  // Largest distance from c that a kernel of the class may have, from epsilon, k and the sums of |a * w|.
  std::vector<double> bound;
};

// All of `args` but w and c, with the weights as a matrix. What the contract fixes to the last bit has bound
// 0 before the activation: arithmetic f32, s8 and, with `fma_in_order`, bf16_fma; with `exact` the activation
// adds its rounding alone.
GemmReference gemm_reference(GemmOperands operands, const GemmArgs& args, const void* w, bool fma_in_order);

}  // namespace encast
