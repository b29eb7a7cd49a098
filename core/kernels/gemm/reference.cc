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
      // x/2 (1 + tanh z) without the cancellation: x / (1 + e^-2z).
      return x / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Activation::relu:
      return x > 0 ? x : 0;
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::tanh:
      return std::tanh(x);
  }
  return x;
}

bool has_coarse_form(const GemmArgs& args) {
  return args.coarse && (args.activation == Activation::gelu || args.activation == Activation::gelu_tanh);
}

// Arithmetic s8 up to the activation: every rounding is the contract's.
float dequantized(const GemmArgs& args, const int8_t* w, int64_t row, int64_t column) {
  const auto* a = static_cast<const uint8_t*>(args.a) + row * args.a_stride;
  int64_t sum = 0;
  for (int64_t k = 0; k < args.k; ++k) sum += (int64_t{a[k]} - args.a_zero[row]) * w[k];
  return std::fma(static_cast<float>(sum), args.a_scale[row] * args.w_scale[column],
                  args.bias != nullptr ? args.bias[column] : 0.0f);
}

// Arithmetic f32 and bf16_fma up to the activation.
float fused_in_order(GemmOperands operands, const GemmArgs& args, const void* w, int64_t row,
                     int64_t column) {
  float sum = 0;
  for (int64_t k = 0; k < args.k; ++k) {
    sum = std::fma(static_cast<float>(element(operands, args.a, row * args.a_stride + k)),
                   static_cast<float>(element(operands, w, column * args.k + k)), sum);
  }
  return args.bias != nullptr ? sum + args.bias[column] : sum;
}

// n roundings in a row: n u / (1 - n u), Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
double gamma(int64_t n) {
  const double nu = static_cast<double>(n) * kUnitRoundoff;
  return nu / (1 - nu);
}

// The same in double, with what any order of f32 sums may be off by. The bf16 instructions round products and
// sums, and flush what is subnormal.
double in_double(GemmOperands operands, const GemmArgs& args, const void* w, int64_t row, int64_t column,
                 double* error) {
  double sum = args.bias != nullptr ? args.bias[column] : 0.0, magnitude = std::fabs(sum);
  for (int64_t k = 0; k < args.k; ++k) {
    const double product =
        element(operands, args.a, row * args.a_stride + k) * element(operands, w, column * args.k + k);
    sum += product;
    magnitude += std::fabs(product);
  }
  const int64_t roundings = 2 * args.k + 2;
  *error = gamma(roundings) * magnitude + static_cast<double>(roundings) * 0x1p-126;
  return sum;
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

GemmReference gemm_reference(GemmOperands operands, const GemmArgs& args, const void* w, bool fma_in_order) {
  GemmReference result;
  result.c.resize(static_cast<size_t>(args.m * args.n));
  result.bound.resize(result.c.size());
  for (int64_t i = 0; i < args.m; ++i) {
    for (int64_t j = 0; j < args.n; ++j) {
      double value, error = 0;
      if (operands == GemmOperands::q8s8) {
        value = dequantized(args, static_cast<const int8_t*>(w) + j * args.k, i, j);
      } else if (operands == GemmOperands::f32 || fma_in_order) {
        value = fused_in_order(operands, args, w, i, j);
      } else {
        value = in_double(operands, args, w, i, j, &error);
      }
      if (args.activation != Activation::none) {
        value = activate(args.activation, value);
        // No activation is steeper than 1.13. A polynomial may be off by some units in the last place, and
        // where it approaches zero by as much as it would be at one.
        const double own = args.exact              ? 1.001 * kUnitRoundoff * std::fabs(value) + 0x1p-149
                           : has_coarse_form(args) ? 1e-4
                                                   : 8 * kUnitRoundoff * (std::fabs(value) + 1);
        error = 1.13 * error + own;
      }
      if (args.residual != nullptr) {
        const float residual = args.residual[i * args.residual_stride + j];
        if (error == 0) {
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
