#pragma once
#include <cstdint>

#include "simd/vec.h"

// What kernels that use the tile registers of AMX share. They are written over a thin interface of
// Instructions, so that the same source runs on the processor (simd/amx_instructions.h) and on a stand-in in
// plain C++ (testing/amx_stand_in.h). Instructions have
//
//   configure(TileConfig), release()
//   zero<t>()
//   load<t>(p, stride), stream<t>(p, stride)    stream: a load that need not stay in L1
//   store<t>(p, stride)
//   multiply<TileProduct, c, a, b>()            c += a * b
//
// A tile register holds up to 16 rows of 64 bytes. A multiply adds to 16 x 16 sums the products of 16 rows of
// `a`, 16 groups of 32 bits each, and 16 rows of `b`, each a group of 16 columns.
namespace encast {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileGroups = 16;  // 64 bytes of a row of `a`
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileBytes = 64;  // of a row of a tile

// What ldtilecfg reads (Intel SDM, volume 1, chapter 18).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

enum class TileProduct { u8s8, bf16 };

}  // namespace
}  // namespace encast
