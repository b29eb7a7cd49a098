#pragma once
#include "simd/vec.h"

// Choosing a register tile by size: every number of rows and of vectors is a function of its own.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

template <int n>
struct Count {
  static constexpr int value = n;
};

// body(Count<c>) with c = count, 1 <= count <= most.
template <int most, class Body>
ENCAST_SIMD void with_count(int64_t count, Body body) {
  if constexpr (most > 1) {
    if (count < most) {
      with_count<most - 1>(count, body);
      return;
    }
  }
  body(Count<most>{});
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
