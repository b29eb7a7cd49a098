#include "kernels/gemm/reference.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace encast {
namespace {

constexpr double kUnitRoundoff = 0x1p-24;

struct Format {
  int64_t element_bytes, group;
};

Format format_of(GemmOperands operands) {
  switch (operands) {
    case GemmOperands::f32:
      return {4, 1};
    case GemmOperands::q8s8:
      return {1, 4};
    case GemmOperands::bf16:
      return {2, 2};
  }
  return {0, 0};
}

int64_t round_up_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

double element(GemmOperands operands, const void* matrix, int64_t index) {
  if (operands == GemmOperands::f32) return static_cast<const float*>(matrix)[index];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(matrix)[index]} << 16;
  return std::bit_cast<float>(bits);
}

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Activation::relu:
      return x > 0 ? x : 0;
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::tanh:
      return std::tanh(x);
  }
  return x;
}

// Arithmetic s8 up to the activation: every rounding is the contract's.
float dequantized(const GemmArgs& args, const int8_t* w, int64_t row, int64_t column) {
  const auto* a = static_cast<const uint8_t*>(args.a) + row * args.a_stride;
  int64_t sum = 0;
  for (int64_t k = 0; k < args.k; ++k) sum += (int64_t{a[k]} - args.a_zero[row]) * w[k];
  return std::fma(static_cast<float>(sum), args.a_scale[row] * args.w_scale[column],
                  args.bias != nullptr ? args.bias[column] : 0.0f);
}

// n roundings in a row: n u / (1 - n u), Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
double gamma(int64_t n) {
  const double nu = static_cast<double>(n) * kUnitRoundoff;
  return nu / (1 - nu);
}

}  // namespace

int64_t gemm_packed_bytes(GemmOperands operands, int64_t n, int64_t k) {
  const Format format = format_of(operands);
  return round_up_to(n, kPanel) * round_up_to(k, format.group) * format.element_bytes;
}

void gemm_pack(GemmOperands operands, const void* w, int64_t n, int64_t k, void* packed) {
  const auto [bytes, group] = format_of(operands);
  std::memset(packed, 0, static_cast<size_t>(gemm_packed_bytes(operands, n, k)));
  const int64_t k_padded = round_up_to(k, group);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t to =
          j / kPanel * kPanel * k_padded + i / group * group * kPanel + j % kPanel * group + i % group;
      std::memcpy(static_cast<uint8_t*>(packed) + to * bytes,
                  static_cast<const uint8_t*>(w) + (j * k + i) * bytes, static_cast<size_t>(bytes));
    }
  }
}

GemmReference gemm_reference(GemmOperands operands, const GemmArgs& args, const void* w) {
  GemmReference result;
  result.c.resize(static_cast<size_t>(args.m * args.n));
  result.bound.resize(result.c.size());
  const bool exact = operands == GemmOperands::q8s8 && args.activation == Activation::none;
  for (int64_t i = 0; i < args.m; ++i) {
    for (int64_t j = 0; j < args.n; ++j) {
      double value = 0, error = 0;
      if (operands == GemmOperands::q8s8) {
        value = dequantized(args, static_cast<const int8_t*>(w) + j * args.k, i, j);
      } else {
        double magnitude = args.bias != nullptr ? std::fabs(args.bias[j]) : 0.0;
        value = args.bias != nullptr ? args.bias[j] : 0.0;
        for (int64_t k = 0; k < args.k; ++k) {
          const double product =
              element(operands, args.a, i * args.a_stride + k) * element(operands, w, j * args.k + k);
          value += product;
          magnitude += std::fabs(product);
        }
        // One rounding for every k and for the bias. The bf16 instructions round the products too, and flush
        // what is subnormal.
        const int64_t roundings = operands == GemmOperands::bf16 ? 2 * args.k + 2 : args.k + 1;
        error = gamma(roundings) * magnitude + static_cast<double>(roundings) * 0x1p-126;
      }
      if (args.activation != Activation::none) {
        value = activate(args.activation, value);
        // No activation is steeper than 1.13; their polynomials and the rounding of the result add the rest.
        error = 1.13 * error + 8 * kUnitRoundoff * (std::fabs(value) + 1);
      }
      if (args.residual != nullptr) {
        const float residual = args.residual[i * args.residual_stride + j];
        if (exact) {
          value = static_cast<float>(value) + residual;
        } else {
          value += residual;
          error += kUnitRoundoff * (std::fabs(value) + error);
        }
      }
      result.c[static_cast<size_t>(i * args.n + j)] = value;
      result.bound[static_cast<size_t>(i * args.n + j)] = error;
    }
  }
  return result;
}

}  // namespace encast
