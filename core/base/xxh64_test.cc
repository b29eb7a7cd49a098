#include "base/xxh64.h"

#include <string_view>
#include <vector>

#include "testing/check.h"
#include "testing/guard.h"

namespace encast {
namespace {

struct Vector {
  size_t bytes;
  uint64_t seed, hash;
};

// Of the buffer whose byte i is 7 * i + 3, made with the reference implementation (xxHash 0.8). The lengths
// stand on both sides of every step of the algorithm: 1, 4, 8 and 32 bytes.
constexpr Vector kVectors[] = {
    {0, 0, 0xef46db3751d8e999u},   {0, 2654435761u, 0xac75fda2929b17efu},
    {1, 0, 0x1f25c8d0bc1f4bb6u},   {1, 2654435761u, 0x79cf94f5ace37fe1u},
    {3, 0, 0x31d2363f52e564c9u},   {3, 2654435761u, 0x96d2a5e583ddd738u},
    {4, 0, 0x9bb64b7d66ee9fdau},   {4, 2654435761u, 0x4a862fbb4b73776eu},
    {5, 0, 0xc7608efddb7051feu},   {5, 2654435761u, 0xf6ca02179471d4a8u},
    {7, 0, 0x9a7b149959ce60d8u},   {7, 2654435761u, 0xddc5cf71d37a6368u},
    {8, 0, 0xdab99d95c6f90092u},   {8, 2654435761u, 0xc6e75e2cbd8e07eeu},
    {14, 0, 0xc7f1d4d0acfa5a14u},  {14, 2654435761u, 0x51341a138b098941u},
    {31, 0, 0xa2aa5f33cc4a6119u},  {31, 2654435761u, 0x381822f33376d6b6u},
    {32, 0, 0x23c3c17ef790fd97u},  {32, 2654435761u, 0x9abd315470ac276au},
    {33, 0, 0x50a7cfc7ba588784u},  {33, 2654435761u, 0x72cdd3262f467933u},
    {63, 0, 0x5e3e54b431c7493cu},  {63, 2654435761u, 0x634da7d265979e61u},
    {64, 0, 0x0eb64b3ef6eeb01fu},  {64, 2654435761u, 0xbcb3847d70525180u},
    {101, 0, 0xbad4d3bf033bda4cu}, {101, 2654435761u, 0x6c892ceebbc660aau},
    {222, 0, 0x8488aa61fc67f7ebu}, {222, 2654435761u, 0xa0e106fbd1fdfc38u},
};

ENCAST_TEST(known_vectors) {
  for (const Vector& vector : kVectors) {
    testing::GuardedBuffer<uint8_t> buffer(vector.bytes);
    for (size_t i = 0; i < vector.bytes; ++i) buffer[i] = static_cast<uint8_t>(7 * i + 3);
    CHECK_EQ(xxh64(buffer.data(), vector.bytes, vector.seed), vector.hash, "bytes=", vector.bytes);
  }
}

ENCAST_TEST(known_texts) {
  const auto hash = [](std::string_view text) { return xxh64(text.data(), text.size()); };
  CHECK_EQ(hash("abc"), 0x44bc2cf5ad770999u);
  CHECK_EQ(hash("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
}

ENCAST_TEST(alignment_does_not_matter) {
  std::vector<uint8_t> bytes(120);
  for (size_t shift = 0; shift < 8; ++shift) {
    for (size_t i = 0; i < 101; ++i) bytes[shift + i] = static_cast<uint8_t>(7 * i + 3);
    CHECK_EQ(xxh64(bytes.data() + shift, 101), 0xbad4d3bf033bda4cu, "shift=", shift);
  }
}

ENCAST_TEST(every_bit_counts) {
  std::vector<uint8_t> bytes(77);
  testing::Rng random;
  random.fill_integer<uint8_t>(bytes, 0, 255);
  const uint64_t hash = xxh64(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CHECK(xxh64(bytes.data(), bytes.size()) != hash, "bit=", bit);
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
