#include <immintrin.h>

#include <cstdint>

// Four sums of 16 x 16, so that the 52 cycles of a tile product are covered by the 16 that each occupies the
// unit.
namespace encast {
namespace {

// What ldtilecfg reads (Intel SDM, volume 1, chapter 18): eight tiles of 16 rows of 64 bytes.
struct alignas(64) Tiles {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Tiles) == 64);

struct alignas(64) Ones {
  float rows[16][16];
};

void configure() {
  static constexpr Tiles kTiles;
  Ones ones;
  for (auto& row : ones.rows)
    for (float& x : row) x = 1.0f;
  _tile_loadconfig(&kTiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, &ones, 64);
  _tile_loadd(5, &ones, 64);
  _tile_loadd(6, &ones, 64);
  _tile_loadd(7, &ones, 64);
}

}  // namespace

void peak_int8_amx(int64_t passes) {
  configure();
  for (int64_t i = 0; i < passes; ++i) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
}

void peak_bf16_amx(int64_t passes) {
  configure();
  for (int64_t i = 0; i < passes; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

}  // namespace encast
