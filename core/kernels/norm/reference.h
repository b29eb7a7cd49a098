#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "testing/tolerance.h"

// Layer norm and RMS norm of one row in double, with the largest error that f32 may have made. For tests.
namespace encast::testing {

struct ReferenceNorm {
  std::vector<double> value, bound;
};

// x: the exact row; x_error: how far from it the row that was normed may lie.
inline ReferenceNorm reference_norm(const std::vector<double>& x, const std::vector<double>& x_error,
                                    const float* gamma, const float* beta, double eps) {
  const size_t n = x.size();
  const double count = static_cast<double>(n), u = kEpsilonF32;
  double mean = 0, magnitude = 0, mean_input_error = 0;
  for (size_t j = 0; j < n; ++j) {
    mean += x[j] / count;
    magnitude += (std::abs(x[j]) + x_error[j]) / count;
    mean_input_error += x_error[j] / count;
  }
  // n - 1 additions and a division.
  const double mean_error = gamma_bound(static_cast<int64_t>(n)) * magnitude + mean_input_error;

  double variance = 0, variance_error = 0;
  std::vector<double> deviation_error(n);
  for (size_t j = 0; j < n; ++j) {
    const double deviation = std::abs(x[j] - mean);
    deviation_error[j] = (x_error[j] + mean_error) * (1 + u) + u * deviation;
    variance += deviation * deviation / count;
    variance_error += deviation_error[j] * (2 * deviation + deviation_error[j]) / count;
  }
  variance_error += gamma_bound(static_cast<int64_t>(n) + 1) * (variance + variance_error);

  // Addition of eps, square root and reciprocal round once each.
  const double inverse = 1 / std::sqrt(variance + eps);
  const double worst = 1 / std::sqrt(std::max(variance - variance_error, 0.0) + eps) * (1 + gamma_bound(3));
  ReferenceNorm norm{std::vector<double>(n), std::vector<double>(n)};
  for (size_t j = 0; j < n; ++j) {
    const double deviation = std::abs(x[j] - mean);
    const double unit_error = (deviation + deviation_error[j]) * worst * (1 + u) - deviation * inverse;
    norm.value[j] = (x[j] - mean) * inverse * gamma[j] + beta[j];
    norm.bound[j] = std::abs(gamma[j]) * unit_error * (1 + u) + u * std::abs(norm.value[j]) + 1e-44;
  }
  return norm;
}

// What reference_norm is without a mean and beta.
inline ReferenceNorm reference_rms_norm(const std::vector<double>& x, const std::vector<double>& x_error,
                                        const float* gamma, double eps) {
  const size_t n = x.size();
  const double count = static_cast<double>(n), u = kEpsilonF32;
  double mean = 0, mean_error = 0;  // of the squares
  for (size_t j = 0; j < n; ++j) {
    mean += x[j] * x[j] / count;
    mean_error += x_error[j] * (2 * std::abs(x[j]) + x_error[j]) / count;
  }
  mean_error += gamma_bound(static_cast<int64_t>(n) + 1) * (mean + mean_error);

  // Addition of eps, square root and reciprocal round once each.
  const double inverse = 1 / std::sqrt(mean + eps);
  const double worst = 1 / std::sqrt(std::max(mean - mean_error, 0.0) + eps) * (1 + gamma_bound(3));
  ReferenceNorm norm{std::vector<double>(n), std::vector<double>(n)};
  for (size_t j = 0; j < n; ++j) {
    const double unit_error = (std::abs(x[j]) + x_error[j]) * worst * (1 + u) - std::abs(x[j]) * inverse;
    norm.value[j] = x[j] * inverse * gamma[j];
    norm.bound[j] = std::abs(gamma[j]) * unit_error * (1 + u) + u * std::abs(norm.value[j]) + 1e-44;
  }
  return norm;
}

}  // namespace encast::testing
