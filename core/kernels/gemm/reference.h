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

// All of `args` but w and c, with the weights as a matrix. Integer sums are exact and their epilogue is
// rounded as the contract says, so that without an activation the bound of q8s8 is 0.
GemmReference gemm_reference(GemmOperands operands, const GemmArgs& args, const void* w);

}  // namespace encast
