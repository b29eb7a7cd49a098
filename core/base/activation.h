#pragma once
#include <cstdint>

namespace encast {

// Elementwise activations; gelu is the erf form, gelu_tanh the tanh form.
enum class Activation : uint8_t { none, gelu, gelu_tanh, relu, silu, tanh };

}  // namespace encast
