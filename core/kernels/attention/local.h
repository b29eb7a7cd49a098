#pragma once
#include "simd/vec.h"

// What a reach hides from a query.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// Makes the scores of one row minus infinity for the keys before `low` and after `high`; returns the largest
// of sixteen columns each. `keys` scores are there, and what follows the last one up to a whole vector is
// minus infinity already.
ENCAST_SIMD F32x16 hide_far(float* scores, int64_t keys, int64_t low, int64_t high) {
  const F32x16 hidden = set1(-__builtin_inff());
  F32x16 top = hidden;
  for (int64_t key = 0; key < keys; key += 16) {
    const int64_t before = low - key, seen = high + 1 - key;
    if (before >= 16 || seen <= 0) {
      store(scores + key, hidden);
      continue;
    }
    F32x16 score = load(scores + key);
    if (before > 0) score = select(first_lanes(before), hidden, score);
    if (seen < 16) score = select(first_lanes(seen), score, hidden);
    store(scores + key, score);
    top = max(score, top);
  }
  return top;
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
