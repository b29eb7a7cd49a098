#include "base/thread_scratch.h"

#include <cstdlib>

#include "base/dtype.h"

namespace encast {
namespace {

constexpr int64_t kAlignment = 64;

struct Scratch {
  uint8_t* memory = nullptr;
  size_t bytes = 0;

  ~Scratch() { std::free(memory); }
};

thread_local Scratch scratch;

}  // namespace

uint8_t* thread_scratch(size_t bytes) noexcept {
  if (bytes > scratch.bytes || scratch.memory == nullptr) {
    std::free(scratch.memory);
    const auto rounded = static_cast<size_t>(round_up(static_cast<int64_t>(bytes), kAlignment));
    scratch.memory = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, rounded));
    scratch.bytes = scratch.memory == nullptr ? 0 : rounded;
  }
  return scratch.memory;
}

}  // namespace encast
