#pragma once
#include <cstdint>

// Contract: self-attention inside every sequence of a packed batch.
// op attention: out = softmax(scale * q k^T + bias) v, a head at a time. Arithmetic:
//   f32     both products of f32 operands
//   bf16_*  of operands (powers too) rounded to bf16, sums in f32 in the order of the instruction
//   s8      of integer codes, sums exact; src/encast/ir/ops.py (attention) defines the codes
// With a reach a query sees the keys that are at most so far away (src/encast/ir/ops.py, local_attention).
// With tables of distances (class f32 alone; He et al. 2021, DeBERTa) the scores are
//   scale * (q_i k_j + q_i key_table[j - i] + k_j query_table[i - j]),
// see disentangled_attention in src/encast/ir/ops.py.
// The bits of a row depend on its own sequence only: not on neighbours, not on the query block.
namespace encast {

struct AttentionArgs {
  const float* qkv = nullptr;  // [tokens, 3 * heads * head_dim]: all heads' q, then k, then v
  int64_t qkv_stride = 0;
  const int32_t* cu_seqlens = nullptr;  // [seqs + 1], rows of qkv
  int32_t heads = 0, head_dim = 0;
  float scale = 1.0f;  // positive
  const float* bias =
      nullptr;           // [heads, 2 * bias_len - 1] or null; score (i, j) gets column j - i + bias_len - 1
  int64_t bias_len = 0;  // no sequence is longer when bias is given
  int64_t reach = 0;     // 0: all keys; a bias has none
  // [seqs] or null: so many first tokens of every sequence are keys, one or more. With a reach those behind
  // them are no more than it, so that every query sees a key.
  const int32_t* seen = nullptr;
  // [heads, table_columns / 16, head_dim, 16] or null: a vector of head_dim for every distance, sixteen
  // distances side by side; distance d has column d + relative_origin(table_columns). With one of them there
  // is neither a bias nor a reach.
  const float* key_table = nullptr;
  const float* query_table = nullptr;
  int64_t table_columns = 0;
  bool shared_tables = false;  // one for all heads: [table_columns / 16, head_dim, 16]
  float* out = nullptr;        // [tokens, heads * head_dim]
  int64_t out_stride = 0;
  bool exact = false;  // exp by libm in double instead of a polynomial
};

// Columns of a table of distances for texts up to max_len, and the one of distance 0. Sixteen keys and the
// queries from a multiple of sixteen on then have distances that begin with a block of sixteen columns, and
// those that are no key's lie within the table.
constexpr int64_t relative_columns(int64_t max_len) { return 2 * ((max_len + 15) / 16 * 16) + 16; }
constexpr int64_t relative_origin(int64_t columns) { return columns / 2 + 7; }

// Bytes of scratch (64-byte aligned) that one call needs for sequences up to max_len; `tables`: with tables
// of distances.
int64_t attention_scratch_bytes(int64_t max_len, int64_t head_dim, bool tables = false);

// One head of one sequence, query rows [query_begin, query_end) of it.
using AttentionFn = void (*)(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                             int64_t query_end, void* scratch);

}  // namespace encast
