#pragma once
#include <cstdint>

// Contract: tokens to sequences, arithmetic f32.
// op pool_rows: one pooling mode into `cols` columns of out. op gather_rows: out[i] = x[rows[i]].
// op normalize_rows: out = x / max(|x|, 1e-12).
namespace encast {

enum class Pooling : uint8_t {
#define ENCAST_POOLING(name) name,
#include "kernels/reduce/pooling.inc"
#undef ENCAST_POOLING
};

struct PoolArgs {
  int64_t cols = 0;
  const float* x = nullptr;  // [tokens, cols]
  int64_t x_stride = 0;
  const int32_t* cu_seqlens = nullptr;  // [seqs + 1]
  Pooling mode = Pooling::mean;
  float* out = nullptr;  // [seqs, cols]
  int64_t out_stride = 0;
};
using PoolFn = void (*)(const PoolArgs& args, int64_t seq_begin, int64_t seq_end);

struct GatherArgs {
  int64_t cols = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* rows = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
};
using GatherFn = void (*)(const GatherArgs& args, int64_t row_begin, int64_t row_end);

struct NormalizeArgs {
  int64_t cols = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* out = nullptr;  // may be x
  int64_t out_stride = 0;
};
using NormalizeFn = void (*)(const NormalizeArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
