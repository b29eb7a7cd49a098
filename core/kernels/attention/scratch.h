#pragma once
#include <cstdint>

// How one call divides its scratch. First classes f32 and bf16_fma: all sizes are in floats and multiples of
// 16, so every part starts on a 64-byte boundary when the whole does.
//
//   keys     [len/64][head_dim][64]          panels of 64 keys, transposed
//   values   [len][head_dim rounded to 16]   zero-padded
//   scores   [rows][len rounded to 64]       of one block of queries
//   context  [rows][head_dim rounded to 16]  of the same block
//   queries  [rows][head_dim rounded to 16]  of the same block
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
  int64_t keys, values, scores, context, queries;
  constexpr int64_t floats() const { return keys + values + scores + context + queries; }
};

// Never smaller for a longer sequence: scratch made for the longest serves all others.
constexpr ScratchParts scratch_parts(int64_t len, int64_t head_dim) {
  const int64_t padded_len = round_up_to(len, kKeyPanel), padded_dim = round_up_to(head_dim, 16);
  const int64_t full = kMaxQueryRows * padded_len, least = kMinQueryRows * padded_len;
  const int64_t bounded = full < kScoreFloats ? full : kScoreFloats;
  return {padded_len * head_dim, padded_len * padded_dim, bounded > least ? bounded : least,
          kMaxQueryRows * padded_dim, kMaxQueryRows * padded_dim};
}

// What tables of distances need behind those parts, in floats.
//
//   products   of kDistanceRows queries by the distances of all keys, or of sixteen keys by those of the
//              block's queries; vectors are read from any float on, so a last row has some to spare
//   keys       [16][head_dim rounded to 16]
constexpr int64_t kDistanceRows = 24;  // a multiple of every tile's rows

struct DistanceParts {
  int64_t products, keys;
  constexpr int64_t floats() const { return products + keys; }
};

constexpr DistanceParts distance_parts(int64_t len, int64_t head_dim) {
  const int64_t of_queries = kDistanceRows * (round_up_to(len + kDistanceRows, 16) + 32);
  const int64_t of_keys = 16 * (kMaxQueryRows + 48);
  return {(of_queries > of_keys ? of_queries : of_keys) + 64, 16 * round_up_to(head_dim, 16)};
}

// The narrow classes (narrow_impl.h), in bytes; every part is a multiple of 64. A group is 32 bits of codes:
// 4 bytes or 2 halves. Keys come in blocks, and only one block's scores and powers exist at a time. `rows`
// are narrow_query_rows at their most.
//
//   keys         [len/64][groups of head_dim][64][group]   panels of 64 keys; groups in sixteens for tiles
//   corrections  [len/64][64] i32                          what the offset of query codes adds to scores
//   values       [groups of len][dims][group]              dims: head_dim rounded to 16
//   queries      [rows][groups of head_dim, 64 bytes][group]
//   scores       [rows][block and kRowGap] f32             block: len rounded to 64, at most kKeyBlock
//   powers       [rows][groups of block and kRowGap][group]
//   context      [rows][dims] f32                          between the blocks
//   lanes        [rows][16] f32                            partial maxima, then partial sums
//   rows         [7][rows] f32                             what is known of a query
//   channels     [5][dims] f32                             what is known of a column of keys or values
constexpr int64_t kKeyBlock = 1024;  // of the definition: ATTENTION_KEY_BLOCK in src/encast/ir/ops.py
constexpr int64_t kRowVectors = 7, kChannelVectors = 5;
constexpr int64_t kMaxTileRows = 128;
// Bytes between rows of scores and of powers. Without it sixteen rows of 512 keys lie in two sets of L1.
constexpr int64_t kRowGap = 64;

// Queries a block. The unit of tiles falls asleep within a microsecond and takes a third of one to wake, so
// it gets more at a time: as many as leave the scores within kScoreFloats.
constexpr int64_t narrow_query_rows(int64_t block, bool tiles) {
  const int64_t rows = kScoreFloats / block / 16 * 16;
  return !tiles || rows < kMaxQueryRows ? kMaxQueryRows : rows > kMaxTileRows ? kMaxTileRows : rows;
}

struct NarrowParts {
  int64_t keys, corrections, values, queries, scores, powers, context, lanes, rows, channels;
  constexpr int64_t bytes() const {
    return keys + corrections + values + queries + scores + powers + context + lanes + rows + channels;
  }
};

constexpr NarrowParts narrow_parts(int64_t len, int64_t head_dim, int64_t group, bool tiles) {
  const int64_t padded_len = round_up_to(len, kKeyPanel), dims = round_up_to(head_dim, 16);
  const int64_t block = padded_len < kKeyBlock ? padded_len : kKeyBlock, code = 4 / group;
  const int64_t query_bytes = round_up_to(head_dim * code, 64), rows = tiles ? kMaxTileRows : kMaxQueryRows;
  const int64_t scores = rows * block < kScoreFloats ? rows * block : kScoreFloats;
  return {.keys = padded_len * (tiles ? query_bytes : round_up_to(head_dim, group) * code),
          .corrections = padded_len * 4,
          .values = padded_len * dims * code,
          .queries = rows * query_bytes,
          .scores = scores * 4 + rows * kRowGap,
          .powers = scores * code + rows * kRowGap,
          .context = rows * dims * 4,
          .lanes = rows * 64,
          .rows = kRowVectors * rows * 4,
          .channels = kChannelVectors * dims * 4};
}

}  // namespace
}  // namespace encast
