#pragma once
#include <span>
#include <string_view>

#include "cpu/isa.h"

// One list of every kernel, expanded from the families' kernels.inc manifests.
//
// A row names its arithmetic class: kernels of one (op, arithmetic) give the same bits for the same
// operands, whatever their ISA level, tile and partition. Lowering fixes the class of a step; the
// executor picks among the members by ISA level and by the number of rows.
namespace encast {

using AnyKernel = void (*)();

struct KernelInfo {
  const char* family;      // gemm, sparse, attention, norm, elementwise, quantize, embed, reduce
  const char* op;          // what it computes, e.g. gemm_f32, gemm_q8s8, norm_rows
  const char* name;        // family_operands_tile_isa, e.g. gemm_q8_s8_s32_6x64_avx512vnni
  const char* arithmetic;  // class, e.g. f32, s8, bf16_fma, bf16_dp, bf16_tile
  Isa isa;
  int min_rows;  // selection uses it from this many rows on
  AnyKernel fn;  // cast to the family's function type
};

// All rows, in manifest order, usable here or not.
std::span<const KernelInfo> all_kernels();

// The row to use: among those of `op` and `arithmetic` whose level is allowed and whose min_rows is at
// most `rows`, the one of the highest level, then of the largest min_rows.
// nullptr when there is none (an unknown op or class, or none that this machine may run).
const KernelInfo* select_kernel(std::string_view op, std::string_view arithmetic, int64_t rows);

}  // namespace encast
