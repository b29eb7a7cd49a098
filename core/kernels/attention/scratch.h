#pragma once
#include <cstdint>

// How one call divides its scratch. All sizes are in floats and multiples of 16, so every part starts on a
// 64-byte boundary when the whole does.
//
//   keys     [len/64][head_dim][64]          panels of 64 keys, transposed
//   values   [len][head_dim rounded to 16]   zero-padded
//   scores   [rows][len rounded to 64]       of one block of queries
//   context  [rows][head_dim rounded to 16]  of the same block
namespace encast {
namespace {

constexpr int64_t kKeyPanel = 64;
constexpr int64_t kMaxQueryRows = 48;  // a multiple of every tile's rows
constexpr int64_t kMinQueryRows = 12;
// Up to 1024 tokens a block has 48 queries; longer sequences get smaller blocks, so that their scores stay
// within 192 KiB and leave the rest of L2 to keys and values.
constexpr int64_t kScoreFloats = 1024 * kMaxQueryRows;

constexpr int64_t round_up_to(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Queries a block of a sequence of `len`.
constexpr int64_t query_rows(int64_t len) {
  const int64_t rows = kScoreFloats / round_up_to(len, kKeyPanel) / kMinQueryRows * kMinQueryRows;
  return rows < kMinQueryRows ? kMinQueryRows : rows > kMaxQueryRows ? kMaxQueryRows : rows;
}

struct ScratchParts {
  int64_t keys, values, scores, context;
  constexpr int64_t floats() const { return keys + values + scores + context; }
};

// Never smaller for a longer sequence: scratch made for the longest serves all others.
constexpr ScratchParts scratch_parts(int64_t len, int64_t head_dim) {
  const int64_t padded_len = round_up_to(len, kKeyPanel), padded_dim = round_up_to(head_dim, 16);
  const int64_t full = kMaxQueryRows * padded_len, least = kMinQueryRows * padded_len;
  const int64_t bounded = full < kScoreFloats ? full : kScoreFloats;
  return {padded_len * head_dim, padded_len * padded_dim, bounded > least ? bounded : least,
          kMaxQueryRows * padded_dim};
}

}  // namespace
}  // namespace encast
