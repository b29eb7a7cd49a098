#pragma once
#include "kernels/embed/embed.h"
#include "kernels/norm/norm_row.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// The rows of the three tables that make one token; absent ones are null.
struct TableRows {
  const float* word;
  const float* token_type;
  const float* position;
};

template <class Lanes>
ENCAST_SIMD F32x16 sum_of_tables(const TableRows& rows, int64_t col, Lanes lanes) {
  F32x16 sum = load(rows.word + col, lanes);
  if (rows.token_type != nullptr) sum = sum + load(rows.token_type + col, lanes);
  if (rows.position != nullptr) sum = sum + load(rows.position + col, lanes);
  return sum;
}

ENCAST_SIMD const float* table_row(const float* table, const int32_t* ids, int64_t token, int64_t cols) {
  return table == nullptr ? nullptr : table + ids[token] * cols;
}

// Words lie all over a table that no cache holds: rows of tokens to come are asked for while this one is
// summed.
constexpr int64_t kWordsAhead = 4;

ENCAST_SIMD void prefetch_word(const EmbedArgs& args, int64_t token) {
  const float* row = table_row(args.word, args.token_ids, token, args.cols);
  for (int64_t col = 0; col < args.cols; col += 16) __builtin_prefetch(row + col, 0, 2);
}

static inline void embed_rows(const EmbedArgs& args, int64_t row_begin, int64_t row_end) {
  const LayerNorm norm = {args.gamma, args.beta, args.eps};
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (row + kWordsAhead < row_end) prefetch_word(args, row + kWordsAhead);
    const TableRows rows = {table_row(args.word, args.token_ids, row, args.cols),
                            table_row(args.token_type, args.token_type_ids, row, args.cols),
                            table_row(args.position, args.positions, row, args.cols)};
    float* out = args.out + row * args.out_stride;
    Extremes extremes[1] = {no_extremes()};
    if (args.gamma != nullptr) {
      float* const outs[1] = {out};
      layer_norm_rows(args.cols, norm, outs, extremes, [&](int, int64_t col, auto lanes) ENCAST_SIMD_BODY {
        return sum_of_tables(rows, col, lanes);
      });
    } else {
      for_columns(args.cols, [&](int, int64_t col, auto lanes) ENCAST_SIMD_BODY {
        const F32x16 sum = sum_of_tables(rows, col, lanes);
        store(out + col, lanes, sum);
        include(extremes[0], sum);
      });
    }
    narrow_row(args.narrow, row, out, args.cols, extremes[0]);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
