#pragma once
#include <cstdint>

namespace encast {

enum class Activation : uint8_t {
#define ENCAST_ACTIVATION(name) name,
#include "base/activation.inc"
#undef ENCAST_ACTIVATION
};

}  // namespace encast
