#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numbers>
#include <span>

// Seeded random numbers that are the same on every machine and standard library.
namespace encast::testing {

// ENCAST_TEST_SEED, or else a fixed seed: a run repeats unless asked otherwise. Failures print it.
inline uint64_t test_seed() {
  static const uint64_t seed = [] {
    const char* text = std::getenv("ENCAST_TEST_SEED");
    return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : uint64_t{20240229};
  }();
  return seed;
}

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Rng {
 public:
  // `stream` tells apart the generators of one test program.
  explicit Rng(uint64_t stream = 0) : state_(test_seed() + 0x9e3779b97f4a7c15u * (stream + 1)) {}

  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // In [0, 1), 53 random bits.
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  float uniform(float low = -1.0f, float high = 1.0f) {
    return static_cast<float>(low + (static_cast<double>(high) - low) * unit());
  }

  // Box-Muller, one of the pair.
  float normal(float mean = 0.0f, float deviation = 1.0f) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - unit()));
    return static_cast<float>(mean + deviation * radius * std::cos(2.0 * std::numbers::pi * unit()));
  }

  // In [low, high], both ends included.
  int64_t integer(int64_t low, int64_t high) {
    const uint64_t count = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    const uint64_t step = count == 0 ? bits() : bits() % count;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + step);
  }

  bool coin() { return (bits() & 1) != 0; }

  void fill_uniform(std::span<float> out, float low = -1.0f, float high = 1.0f) {
    for (float& value : out) value = uniform(low, high);
  }
  void fill_normal(std::span<float> out, float mean = 0.0f, float deviation = 1.0f) {
    for (float& value : out) value = normal(mean, deviation);
  }
  template <class T>
  void fill_integer(std::span<T> out, int64_t low, int64_t high) {
    for (T& value : out) value = static_cast<T>(integer(low, high));
  }

 private:
  uint64_t state_;
};

}  // namespace encast::testing
