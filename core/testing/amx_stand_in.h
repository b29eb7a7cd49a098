#pragma once
#include <bit>
#include <cmath>
#include <cstring>

#include "simd/amx.h"

// The tile instructions in plain C++, after the operation sections of Intel's manual. What the processor
// would fault on stops the program.
namespace encast {
namespace {

class AmxStandIn {
 public:
  void configure(const TileConfig& config) {
    require(config.palette == 1 && config.start_row == 0);
    for (int t = 0; t < 8; ++t) {
      require(config.rows[t] <= kTileRows && config.row_bytes[t] <= kTileBytes);
      require((config.rows[t] == 0) == (config.row_bytes[t] == 0));
      tiles_[t] = {};
      tiles_[t].rows = config.rows[t];
      tiles_[t].row_bytes = config.row_bytes[t];
    }
  }
  void release() {
    for (Tile& tile : tiles_) tile = {};
  }

  template <int t>
  void zero() {
    require(tiles_[t].rows > 0);
    std::memset(tiles_[t].bytes, 0, sizeof tiles_[t].bytes);
  }
  template <int t>
  void load(const void* p, int64_t stride) {
    zero<t>();
    for (int i = 0; i < tiles_[t].rows; ++i) {
      std::memcpy(tiles_[t].bytes[i], static_cast<const uint8_t*>(p) + i * stride, tiles_[t].row_bytes);
    }
  }
  template <int t>
  void stream(const void* p, int64_t stride) {
    load<t>(p, stride);
  }
  template <int t>
  void store(void* p, int64_t stride) {
    require(tiles_[t].rows > 0);
    for (int i = 0; i < tiles_[t].rows; ++i) {
      std::memcpy(static_cast<uint8_t*>(p) + i * stride, tiles_[t].bytes[i], tiles_[t].row_bytes);
    }
  }
  template <TileProduct product, int c, int a, int b>
  void multiply() {
    Tile& sums = tiles_[c];
    const Tile &rows = tiles_[a], &columns = tiles_[b];
    require(sums.rows > 0 && sums.rows == rows.rows && sums.row_bytes == columns.row_bytes);
    require(rows.row_bytes == 4 * columns.rows);
    for (int i = 0; i < sums.rows; ++i) {
      for (int j = 0; j < sums.row_bytes / 4; ++j) {
        if constexpr (product == TileProduct::u8s8) {
          multiply_bytes(sums, rows, columns, i, j);
        } else {
          multiply_bf16(sums, rows, columns, i, j);
        }
      }
    }
  }

 private:
  struct Tile {
    int rows = 0, row_bytes = 0;
    alignas(64) uint8_t bytes[kTileRows][kTileBytes] = {};
  };

  static void require(bool legal) {
    if (!legal) __builtin_trap();
  }

  // TDPBUSD: unsigned bytes of `a` times signed bytes of `b`, wrapping sums.
  static void multiply_bytes(Tile& sums, const Tile& rows, const Tile& columns, int i, int j) {
    auto sum = read<uint32_t>(&sums.bytes[i][4 * j]);
    for (int g = 0; g < rows.row_bytes / 4; ++g) {
      for (int k = 0; k < 4; ++k) {
        const int32_t product =
            int32_t{rows.bytes[i][4 * g + k]} * int32_t{static_cast<int8_t>(columns.bytes[g][4 * j + k])};
        sum += static_cast<uint32_t>(product);
      }
    }
    std::memcpy(&sums.bytes[i][4 * j], &sum, sizeof sum);
  }

  // TDPBF16PS: even and odd k are summed apart from zero, then together, then into the tile. Subnormals count
  // as zero on the way in and on the way out.
  static void multiply_bf16(Tile& sums, const Tile& rows, const Tile& columns, int i, int j) {
    float parts[2] = {0.0f, 0.0f};
    for (int g = 0; g < rows.row_bytes / 4; ++g) {
      for (int k = 0; k < 2; ++k) {
        const float x = widen(&rows.bytes[i][4 * g + 2 * k]), y = widen(&columns.bytes[g][4 * j + 2 * k]);
        parts[k] = flush(std::fma(x, y, parts[k]));
      }
    }
    const float sum = flush(read<float>(&sums.bytes[i][4 * j]));
    const float result = flush(sum + flush(parts[0] + parts[1]));
    std::memcpy(&sums.bytes[i][4 * j], &result, sizeof result);
  }

  template <class T>
  static T read(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  static float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
  static float widen(const uint8_t* p) {
    return flush(std::bit_cast<float>(uint32_t{read<uint16_t>(p)} << 16));
  }

  Tile tiles_[8];
};

}  // namespace
}  // namespace encast
