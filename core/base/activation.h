#pragma once
#include <cstdint>

namespace encast {

enum class Activation : uint8_t {
#define ENCAST_ACTIVATION(name) name,
#include "base/activation.inc"
#undef ENCAST_ACTIVATION
};

// Whether it has a coarse form, see simd/activation.h.
constexpr bool has_coarse_form(Activation kind) {
  return kind == Activation::gelu || kind == Activation::gelu_tanh;
}

}  // namespace encast
