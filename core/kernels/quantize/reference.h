#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/rows.h"
#include "testing/check.h"
#include "testing/kernels.h"

// The formulas of narrow rows (src/encast/ir/ops.py: quantize, cast_bf16) one element at a time, and the
// check of a kernel's narrow output against them. For tests.
namespace encast::testing {

struct ReferenceRow {
  std::vector<uint16_t> codes;  // bytes or bf16 patterns, up to columns rounded up to 64
  float scale = 0;
  int32_t zero = 0;
};

// What rows of kind q8_fixed have in tests: some of their elements lie outside of it.
constexpr float kFixedScale = 0.0137f;
constexpr int32_t kFixedZero = 97;

inline ReferenceRow reference_narrow(NarrowOut::Kind kind, const float* x, int64_t cols) {
  ReferenceRow row;
  const size_t padded = static_cast<size_t>((cols + 63) / 64 * 64);
  if (kind == NarrowOut::Kind::bf16) {
    row.codes.assign(padded, 0);
    for (int64_t j = 0; j < cols; ++j) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[j]);
      row.codes[static_cast<size_t>(j)] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return row;
  }
  if (kind == NarrowOut::Kind::q8_fixed) {
    row.scale = kFixedScale;
    row.zero = kFixedZero;
    row.codes.assign(padded, static_cast<uint16_t>(row.zero));
    for (int64_t j = 0; j < cols; ++j) {
      const float steps = std::nearbyint(x[j] * (1.0f / kFixedScale));
      row.codes[static_cast<size_t>(j)] =
          static_cast<uint16_t>(std::clamp(steps, -97.0f, 158.0f) + static_cast<float>(row.zero));
    }
    return row;
  }
  float lo = 0, hi = 0;
  for (int64_t j = 0; j < cols; ++j) {
    lo = std::min(lo, x[j]);
    hi = std::max(hi, x[j]);
  }
  const bool symmetric = kind == NarrowOut::Kind::q8_symmetric;
  const float steps = symmetric ? 127.0f : 255.0f;
  const float extent = symmetric ? std::max(hi, -lo) : hi - lo;
  float reciprocal = steps / extent;
  row.scale = extent / steps;
  if (!std::isfinite(reciprocal)) reciprocal = row.scale = 0;
  row.zero = symmetric ? 128 : static_cast<int32_t>(std::nearbyint(-lo * reciprocal));
  row.codes.assign(padded, static_cast<uint16_t>(row.zero));
  for (int64_t j = 0; j < cols; ++j) {
    const int32_t code = static_cast<int32_t>(std::nearbyint(x[j] * reciprocal)) + row.zero;
    row.codes[static_cast<size_t>(j)] = static_cast<uint16_t>(std::clamp(code, 0, 255));
  }
  return row;
}

constexpr NarrowOut::Kind kNarrowKinds[] = {NarrowOut::Kind::none, NarrowOut::Kind::q8_symmetric,
                                            NarrowOut::Kind::q8_zero_point, NarrowOut::Kind::q8_fixed,
                                            NarrowOut::Kind::bf16};

// Memory for a narrow output of `rows` rows that ends at a guard page.
struct NarrowBuffers {
  NarrowBuffers(NarrowOut::Kind kind, int64_t rows, int64_t cols, int64_t stride)
      : kind(kind),
        bytes(rows, (cols + 63) / 64 * 64, stride),
        halves(rows, (cols + 63) / 64 * 64, stride),
        scale(static_cast<size_t>(rows)),
        zero(static_cast<size_t>(rows)) {}

  NarrowOut out() {
    NarrowOut narrow;
    narrow.kind = kind;
    narrow.data = kind == NarrowOut::Kind::bf16 ? static_cast<void*>(halves.data()) : bytes.data();
    narrow.stride = bytes.stride;
    narrow.scale = scale.data();
    narrow.zero = zero.data();
    narrow.fixed_scale = kFixedScale;
    narrow.fixed_zero = kFixedZero;
    return narrow;
  }

  // The narrow row equals the reference of `x`, bit for bit.
  void check_row(int64_t row, const float* x, int64_t cols, const std::string& note) const {
    if (kind == NarrowOut::Kind::none) return;
    const ReferenceRow want = reference_narrow(kind, x, cols);
    const bool is_bf16 = kind == NarrowOut::Kind::bf16;
    for (size_t j = 0; j < want.codes.size(); ++j) {
      const int64_t col = static_cast<int64_t>(j);
      const int got = is_bf16 ? halves.at(row, col) : bytes.at(row, col);
      CHECK_EQ(got, int{want.codes[j]}, note, " row ", row, " column ", j);
    }
    if (is_bf16) return;
    CHECK_SAME_BITS(&scale[static_cast<size_t>(row)], &want.scale, 1, note, " scale of row ", row);
    CHECK_EQ(zero[static_cast<size_t>(row)], want.zero, note, " zero of row ", row);
  }
  bool check_gaps() const {
    return bytes.check_gaps() && halves.check_gaps() && scale.check_slack() && zero.check_slack();
  }

  NarrowOut::Kind kind;
  GuardedMatrix<uint8_t> bytes;
  GuardedMatrix<uint16_t> halves;
  GuardedBuffer<float> scale;
  GuardedBuffer<int32_t> zero;
};

}  // namespace encast::testing
