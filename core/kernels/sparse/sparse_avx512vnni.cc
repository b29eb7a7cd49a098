#include "cpu/isa.h"
#include "kernels/sparse/driver.h"
#include "kernels/sparse/finish.h"
#include "simd/lanes.h"

namespace encast {
namespace {

// vpdpbusd wants four inputs of a row side by side: four columns are interleaved, and one such set of
// registers serves four outputs. Each function below computes the sums of a block's four outputs for 64, 32,
// 16 or 8 rows, and gives them to `put` while they are in registers: sums[q][output].

// multiply_8 is 13 shuffles for two groups, multiply_16 2 to 5 for one.
int64_t width_of(int64_t rows) {
  if (rows <= 8 && two_shuffle_ports()) return 8;
  return rows <= 16 ? 16 : rows <= 32 ? 32 : kTileRows;
}

// Registers of an output's sums. Of 8 rows half of it counts.
constexpr int vectors_of(int width) { return width < 16 ? 1 : width / 16; }

// Where lane i of sums[q] stands in a tile of kWidth rows.
template <int kWidth>
constexpr int64_t row_of(int q, int i) {
  const int lane = i / 4;
  return i % 4 + (kWidth == 64   ? 16 * lane + 4 * q
                  : kWidth == 32 ? 4 * (lane % 2) + 16 * (lane / 2) + 8 * q
                                 : 4 * lane);
}

ENCAST_SIMD __m512i four_weights(const int8_t* values, int output) {
  int32_t four;
  __builtin_memcpy(&four, values + output * kGroupInputs, sizeof four);
  return _mm512_set1_epi32(four);
}

// Four columns to registers of four rows a lane, with the four inputs of a row side by side.
ENCAST_SIMD void interleave(__m512i x0, __m512i x1, __m512i x2, __m512i x3, __m512i (&x)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi8(x0, x1), high01 = _mm512_unpackhi_epi8(x0, x1);
  const __m512i low23 = _mm512_unpacklo_epi8(x2, x3), high23 = _mm512_unpackhi_epi8(x2, x3);
  x[0] = _mm512_unpacklo_epi16(low01, low23);
  x[1] = _mm512_unpackhi_epi16(low01, low23);
  x[2] = _mm512_unpacklo_epi16(high01, high23);
  x[3] = _mm512_unpackhi_epi16(high01, high23);
}

// A block's groups.
struct Groups {
  static constexpr int64_t kAhead = 384;  // groups: 6 KB of values

  const uint16_t* columns;
  const int8_t* values;
  int64_t count;

  Groups(const SparseWeight& w, int64_t block)
      : columns(w.columns + w.starts[block] * kGroupInputs),
        values(w.values + w.starts[block] * kBlockOutputs * kGroupInputs),
        count(w.starts[block + 1] - w.starts[block]) {}
  // A line of values and half a line of columns, every fourth group. Weights that no cache holds come too
  // late by themselves.
  [[gnu::always_inline]] void fetch_ahead(int64_t group) const {
    if (group % 4 != 0) return;
    __builtin_prefetch(values + kAhead * kBlockOutputs * kGroupInputs);
    __builtin_prefetch(columns + kAhead * kGroupInputs);
  }
  [[gnu::always_inline]] void next() {
    columns += kGroupInputs;
    values += kBlockOutputs * kGroupInputs;
  }
};

// 16 sums, 4 registers of interleaved columns, 4 of the next group's, a weight. The next group's shuffles
// stand between the products of a group, so that they begin while there are products left.
template <class Put>
ENCAST_SIMD void multiply_64(const uint8_t* features, Groups groups, Put put) {
  __m512i sums[4][kBlockOutputs];
  ENCAST_UNROLL for (int i = 0; i < 4 * kBlockOutputs; ++i) sums[i % 4][i / 4] = _mm512_setzero_si512();
  const auto input = [&](int i) ENCAST_SIMD_BODY {
    return _mm512_loadu_si512(features + column_of(groups.columns, i) * kTileRows);
  };
  if (groups.count > 0) {
    __m512i x[4];
    interleave(input(0), input(1), input(2), input(3), x);
    const auto multiply_output = [&](int output) ENCAST_SIMD_BODY {
      const __m512i weight = four_weights(groups.values, output);
      ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
        sums[q][output] = _mm512_dpbusd_epi32(sums[q][output], x[q], weight);
      }
    };
    for (int64_t group = 1; group < groups.count; ++group) {
      groups.fetch_ahead(group - 1);
      groups.columns += kGroupInputs;
      const __m512i next[4] = {input(0), input(1), input(2), input(3)};
      const __m512i low01 = _mm512_unpacklo_epi8(next[0], next[1]),
                    high01 = _mm512_unpackhi_epi8(next[0], next[1]);
      multiply_output(0);
      const __m512i low23 = _mm512_unpacklo_epi8(next[2], next[3]),
                    high23 = _mm512_unpackhi_epi8(next[2], next[3]);
      multiply_output(1);
      const __m512i low[2] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23)};
      multiply_output(2);
      const __m512i high[2] = {_mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
      multiply_output(3);
      x[0] = low[0];
      x[1] = low[1];
      x[2] = high[0];
      x[3] = high[1];
      groups.values += kBlockOutputs * kGroupInputs;
    }
    ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) multiply_output(output);
  }
  put(sums);
}

// Two columns in a register: six instructions bring the inputs of 32 rows side by side.
template <class Put>
ENCAST_SIMD void multiply_32(const uint8_t* features, Groups groups, Put put) {
  const __m512i words = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i sums[2][kBlockOutputs];
  ENCAST_UNROLL for (int i = 0; i < 2 * kBlockOutputs; ++i) sums[i % 2][i / 2] = _mm512_setzero_si512();
  for (int64_t group = 0; group < groups.count; ++group) {
    groups.fetch_ahead(group);
    const auto input = [&](int i) __attribute__((always_inline)) {
      return _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(features + column_of(groups.columns, i) * 32));
    };
    __m512i x02 = _mm512_inserti64x4(_mm512_castsi256_si512(input(0)), input(2), 1);
    __m512i x13 = _mm512_inserti64x4(_mm512_castsi256_si512(input(1)), input(3), 1);
    // Inputs 0 and 1 of rows 0 to 7 and 16 to 23, then inputs 2 and 3 of them; and of the others. The
    // barriers: clang would make eighteen shuffles of these four.
    asm("" : "+v"(x02), "+v"(x13));
    __m512i x[2] = {_mm512_unpacklo_epi8(x02, x13), _mm512_unpackhi_epi8(x02, x13)};
    asm("" : "+v"(x[0]), "+v"(x[1]));
    ENCAST_UNROLL for (int q = 0; q < 2; ++q) x[q] = _mm512_permutexvar_epi16(words, x[q]);
    asm("" : "+v"(x[0]), "+v"(x[1]));
    ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
      const __m512i weight = four_weights(groups.values, output);
      ENCAST_UNROLL for (int q = 0; q < 2; ++q) {
        sums[q][output] = _mm512_dpbusd_epi32(sums[q][output], x[q], weight);
      }
    }
    groups.next();
  }
  put(sums);
}

// In each lane: four bytes of each of four columns to four rows of four inputs.
ENCAST_SIMD __m512i inputs_to_rows() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

// Four columns in a register, and two sets of sums, each of which waits for its last product.
template <class Put>
ENCAST_SIMD void multiply_16(const uint8_t* features, Groups groups, Put put) {
  __m512i sums[2][kBlockOutputs];
  ENCAST_UNROLL for (int i = 0; i < 2 * kBlockOutputs; ++i) sums[i % 2][i / 2] = _mm512_setzero_si512();
  const auto add = [&](__m512i(&own)[kBlockOutputs]) __attribute__((always_inline)) {
    const auto input = [&](int i) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(features + column_of(groups.columns, i) * 16));
    };
    __m512i x = _mm512_castsi128_si512(input(0));
    x = _mm512_inserti32x4(x, input(1), 1);
    x = _mm512_inserti32x4(x, input(2), 2);
    x = _mm512_inserti32x4(x, input(3), 3);
    // The rows of four bytes of each column to a lane, and there to each row its four inputs. The barriers:
    // clang would make nine shuffles of these two.
    asm("" : "+v"(x));
    x = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
    asm("" : "+v"(x));
    x = _mm512_shuffle_epi8(x, inputs_to_rows());
    ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
      own[output] = _mm512_dpbusd_epi32(own[output], x, four_weights(groups.values, output));
    }
    groups.next();
  };
  for (int64_t pair = 0; pair < groups.count / 2; ++pair) {
    groups.fetch_ahead(2 * pair);
    add(sums[0]);
    add(sums[1]);
  }
  if (groups.count % 2 != 0) add(sums[0]);
  __m512i both[1][kBlockOutputs];
  ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
    both[0][output] = _mm512_add_epi32(sums[0][output], sums[1][output]);
  }
  put(both);
}

// Two groups in a register, eight rows of each. The weights of an output go to both halves.
template <class Put>
ENCAST_SIMD void multiply_8(const uint8_t* features, Groups groups, Put put) {
  const __m512i halves = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m512i first_half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
  __m512i sums[1][kBlockOutputs];
  ENCAST_UNROLL for (int i = 0; i < kBlockOutputs; ++i) sums[0][i] = _mm512_setzero_si512();
  // The inputs of two groups, or twice those of one, whose second half then has weights of zero.
  const auto add = [&](int second, __m256i weights) ENCAST_SIMD_BODY {
    const auto two_inputs = [&](int group, int i) ENCAST_SIMD_BODY {
      const auto input = [&](int at) ENCAST_SIMD_BODY {
        return features + column_of(groups.columns + group * kGroupInputs, at) * 8;
      };
      const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(input(i)));
      return _mm_castps_si128(
          _mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(input(i + 1))));
    };
    __m512i x = _mm512_castsi128_si512(two_inputs(0, 0));
    x = _mm512_inserti32x4(x, two_inputs(0, 2), 1);
    x = _mm512_inserti32x4(x, two_inputs(second, 0), 2);
    x = _mm512_inserti32x4(x, two_inputs(second, 2), 3);
    // The barriers: as in multiply_16.
    asm("" : "+v"(x));
    x = _mm512_permutexvar_epi32(halves, x);
    asm("" : "+v"(x));
    x = _mm512_shuffle_epi8(x, inputs_to_rows());
    ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
      const __m512i both = _mm512_permutexvar_epi32(_mm512_add_epi32(first_half, _mm512_set1_epi32(output)),
                                                    _mm512_castsi256_si512(weights));
      sums[0][output] = _mm512_dpbusd_epi32(sums[0][output], x, both);
    }
  };
  for (int64_t pair = 0; pair < groups.count / 2; ++pair) {
    groups.fetch_ahead(2 * pair);
    add(1, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(groups.values)));
    groups.next();
    groups.next();
  }
  if (groups.count % 2 != 0) {
    add(0, _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(groups.values))));
  }
  for (__m512i& sum : sums[0]) sum = _mm512_add_epi32(sum, _mm512_shuffle_i64x2(sum, sum, 0x4e));
  put(sums);
}

template <int kWidth, class Put>
ENCAST_SIMD void multiply(const uint8_t* features, Groups groups, Put put) {
  if constexpr (kWidth == 64) {
    multiply_64(features, groups, put);
  } else if constexpr (kWidth == 32) {
    multiply_32(features, groups, put);
  } else if constexpr (kWidth == 16) {
    multiply_16(features, groups, put);
  } else {
    multiply_8(features, groups, put);
  }
}

// Four blocks of a tile, in 128-bit lanes of one row and four outputs: lane l of rows[q][i][b] is row
// row_of(q, 4l + i) and block b.
template <int kWidth>
struct alignas(64) Staged {
  static constexpr int kVectors = vectors_of(kWidth);

  __m512i rows[kVectors][4][4];

  // Vector q of the four outputs of block b.
  [[gnu::always_inline]] void take(int64_t b, int q, const __m512i (&block)[kBlockOutputs]) {
    const __m512i low01 = _mm512_unpacklo_epi32(block[0], block[1]),
                  high01 = _mm512_unpackhi_epi32(block[0], block[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(block[2], block[3]),
                  high23 = _mm512_unpackhi_epi32(block[2], block[3]);
    _mm512_store_si512(&rows[q][0][b], _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(&rows[q][1][b], _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(&rows[q][2][b], _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(&rows[q][3][b], _mm512_unpackhi_epi64(high01, high23));
  }

  // put(row, the sixteen outputs of it), for all rows of the tile.
  template <class Put>
  [[gnu::always_inline]] void each_row(Put put) const {
    for (int q = 0; q < kVectors; ++q) {
      ENCAST_UNROLL for (int i = 0; i < 4; ++i) {
        const __m512i(&blocks)[4] = rows[q][i];
        const __m512i low01 = _mm512_shuffle_i32x4(blocks[0], blocks[1], 0x44),
                      high01 = _mm512_shuffle_i32x4(blocks[0], blocks[1], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(blocks[2], blocks[3], 0x44),
                      high23 = _mm512_shuffle_i32x4(blocks[2], blocks[3], 0xee);
        put(row_of<kWidth>(q, i), _mm512_shuffle_i32x4(low01, low23, 0x88));
        put(row_of<kWidth>(q, 4 + i), _mm512_shuffle_i32x4(low01, low23, 0xdd));
        if constexpr (kWidth >= 16) {
          put(row_of<kWidth>(q, 8 + i), _mm512_shuffle_i32x4(high01, high23, 0x88));
          put(row_of<kWidth>(q, 12 + i), _mm512_shuffle_i32x4(high01, high23, 0xdd));
        }
      }
    }
  }
};

// Four blocks of values to the rows and columns of c that exist. Arguments by value: a store of a vector may
// change any memory that is not the function's own.
template <int kWidth>
[[gnu::noinline]] void put_values(const GemmArgs args, const Staged<kWidth>& staged, int64_t row,
                                  int64_t rows, int64_t column) {
  const int64_t lanes = lanes_within(args.n - column, 0);
  const float* const residual =
      args.residual == nullptr ? nullptr : args.residual + row * args.residual_stride + column;
  float* const c = args.c + row * args.c_stride + column;
  if (lanes == 16 && rows == kWidth) {
    if (residual == nullptr) {
      staged.each_row([&](int64_t i, __m512i value)
                          ENCAST_SIMD_BODY { _mm512_storeu_si512(c + i * args.c_stride, value); });
    } else {
      staged.each_row([&](int64_t i, __m512i value) ENCAST_SIMD_BODY {
        store(c + i * args.c_stride, from_bits({value}) + load(residual + i * args.residual_stride));
      });
    }
    return;
  }
  staged.each_row([&](int64_t i, __m512i bits_of) ENCAST_SIMD_BODY {
    if (i >= rows) return;
    F32x16 value = from_bits({bits_of});
    if (residual != nullptr) value = value + load_partial(residual + i * args.residual_stride, lanes);
    store_partial(c + i * args.c_stride, lanes, value);
  });
}

// Rows [row, row + rows) of those panels, from columns of kWidth rows.
template <int kWidth>
void multiply_tile(const SparseArgs& args, const uint8_t* features, int64_t row, int64_t rows,
                   int64_t panel_begin, int64_t panel_end) {
  const GemmArgs& product = args.product;
  auto* const sums = reinterpret_cast<int32_t*>(args.scratch);  // of a panel: [row][kPanel]
  constexpr int kVectors = vectors_of(kWidth);
  TileRows<kVectors> tile;
  tile.read(product, row, rows, row_of<kWidth>);
  Staged<kWidth> staged;
  const Bump* const bump = coarse_form(product);
  const bool in_registers = bump != nullptr || product.activation == Activation::none;
  for (int64_t block = panel_begin * kBlocksOfPanel; block < panel_end * kBlocksOfPanel; ++block) {
    const int64_t output = block * kBlockOutputs, column = output / 16 * 16;
    const BlockOutputs outputs(product, output);
    const auto values = [&](const auto& own) ENCAST_SIMD_BODY {
      multiply<kWidth>(features, {args.w, block}, [&](auto& own_sums) ENCAST_SIMD_BODY {
        ENCAST_UNROLL for (int q = 0; q < kVectors; ++q) {
          __m512i finished[kBlockOutputs];
          ENCAST_UNROLL for (int i = 0; i < kBlockOutputs; ++i) {
            finished[i] = bits(own(tile.value(outputs, i, q, own_sums[q][i]))).v;
          }
          staged.take(block % 4, q, finished);
          if (q + 1 < kVectors) begin_after(own_sums[q + 1]);
        }
      });
    };
    if (!in_registers) {
      multiply<kWidth>(features, {args.w, block}, [&](const auto& own_sums) ENCAST_SIMD_BODY {
        ENCAST_UNROLL for (int q = 0; q < kVectors; ++q) staged.take(block % 4, q, own_sums[q]);
      });
    } else if (bump == nullptr) {
      values([](F32x16 value) ENCAST_SIMD_BODY { return value; });
    } else {
      values(CoarseForm(*bump));
    }
    if (block % 4 != 3) continue;
    if (in_registers) {
      put_values(product, staged, row, rows, column);
      continue;
    }
    staged.each_row([&](int64_t i, __m512i value) ENCAST_SIMD_BODY {
      _mm512_storeu_si512(sums + i * kPanel + column % kPanel, value);
    });
    if (block % kBlocksOfPanel != kBlocksOfPanel - 1) continue;
    const int64_t first = column / kPanel * kPanel;
    finish_tile<SparseDot>(product, reinterpret_cast<const float*>(sums), row, rows, first,
                           least(product.n - first, kPanel));
  }
}

void multiply_to_columns(const SparseArgs& args, const uint8_t* features, int64_t row, int64_t rows) {
  const GemmArgs& product = args.product;
  const ColumnsOut to = args.columns;
  TileRows<4> tile;
  tile.read(product, row, rows, row_of<64>);
  for (int i = 0; i < kTileRows; ++i) {
    to.above[i] = 0.0f;
    to.below[i] = -0.0f;
  }
  const auto all_blocks = [&](const auto& activation) ENCAST_SIMD_BODY {
    for (int64_t block = 0; block < product.n / kBlockOutputs; ++block) {
      const int64_t output = block * kBlockOutputs;
      const BlockOutputs outputs(product, output);
      multiply<64>(features, {args.w, block}, [&](auto& sums) ENCAST_SIMD_BODY {
        ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
          __m512i above = _mm512_loadu_si512(to.above + 16 * q),
                  below = _mm512_loadu_si512(to.below + 16 * q);
          ENCAST_UNROLL for (int i = 0; i < kBlockOutputs; ++i) {
            const F32x16 value = activation(tile.value(outputs, i, q, sums[q][i]));
            store(to.values + (output + i) * kTileRows + 16 * q, value);
            above = _mm512_max_epi32(above, bits(value).v);
            below = _mm512_max_epu32(below, bits(value).v);
          }
          _mm512_storeu_si512(to.above + 16 * q, above);
          _mm512_storeu_si512(to.below + 16 * q, below);
          if (q < 3) begin_after(sums[q + 1]);
        }
      });
    }
  };
  if (const Bump* const bump = coarse_form(product)) {
    all_blocks(CoarseForm(*bump));
  } else {
    all_blocks([](F32x16 value) ENCAST_SIMD_BODY { return value; });
  }
}

// Arguments by value: a store of codes may change any memory that is not the function's own.
void narrow_all(const NarrowColumnsArgs args) {
  alignas(64) float scales[kTileRows];
  alignas(64) int32_t zeros[kTileRows];
  F32x16 reciprocal[4];
  I32x16 zero[4];
  ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
    const VectorScale of =
        vector_scale(args.symmetric, load(args.from.above + 16 * q), minus(load(args.from.below + 16 * q)));
    reciprocal[q] = of.reciprocal;
    zero[q] = of.zero;
    store(scales + 16 * q, of.scale);
    store_i32(zeros + 16 * q, of.zero);
  }
  for (int64_t col = 0; col < args.cols; ++col) {
    const float* const values = args.from.values + col * kTileRows;
    __m512i codes[4];
    ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
      codes[q] = (to_i32(load(values + 16 * q) * reciprocal[q]) + zero[q]).v;
    }
    // Packing works within 128-bit lanes, which brings the rows into their order.
    const __m512i low = _mm512_packs_epi32(codes[0], codes[1]), high = _mm512_packs_epi32(codes[2], codes[3]);
    _mm512_storeu_si512(args.codes + col * kTileRows, _mm512_packus_epi16(low, high));
  }
  for (int q = 0; q < 4; ++q) {
    for (int i = 0; i < 16; ++i) {
      const int64_t row = row_of<64>(q, i);
      if (row >= args.rows) continue;
      args.scale[row] = scales[16 * q + i];
      args.zero[row] = zeros[16 * q + i];
    }
  }
}

}  // namespace

void sparse_q8_s8_s32_columns_avx512vnni(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t,
                                         int64_t) {
  uint8_t* const own = scratch_features(args.scratch);
  const int64_t rows = m_end - m_begin;
  multiply_to_columns(args, tile_features(args, m_begin, 0, rows, kTileRows, own), m_begin, rows);
}

void sparse_narrow_columns_avx512vnni(const NarrowColumnsArgs& args) { narrow_all(args); }

void sparse_q8_s8_s32_4x64_avx512vnni(const SparseArgs& args, int64_t m_begin, int64_t m_end,
                                      int64_t panel_begin, int64_t panel_end) {
  uint8_t* const own = scratch_features(args.scratch);
  for (int64_t row = m_begin; row < m_end; row += kTileRows) {
    const int64_t rows = least(m_end - row, kTileRows), width = width_of(rows);
    const uint8_t* const features = tile_features(args, row, row - m_begin, rows, width, own);
    const auto tile = width == 64   ? multiply_tile<64>
                      : width == 32 ? multiply_tile<32>
                      : width == 16 ? multiply_tile<16>
                                    : multiply_tile<8>;
    tile(args, features, row, rows, panel_begin, panel_end);
  }
}

}  // namespace encast
