#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "kernels/attention/attention.h"
#include "testing/tolerance.h"

// One row of one head by the definitions of the arithmetic classes (src/encast/ir/ops.py: attention), in
// double, and how far a kernel of the class may be from it. For tests and the benchmark.
//
// Classes f32, bf16: a score is off by the dot product's bound, the scale and the bias; a power by that
// exponent's error and by its own; the sum of powers and the context are sums of len terms. The maximum
// cancels: powers and their sum use the same. bf16 rounds each power once more, by at most 2^-9 of itself.
//
// Class s8: codes of queries, keys and values are reproduced exactly, and so are the integer sums of the
// scores. What may differ is the code of a power that lies close to the middle of two codes: the bound is the
// sum of what those may change.
namespace encast::testing {

struct AttentionRow {
  const float* qkv = nullptr;  // row 0 of the sequence
  int64_t stride = 0, hidden = 0, len = 0, head = 0, head_dim = 0, query = 0;
  float scale = 1;
  const float* bias = nullptr;       // of key - query = 0, or null
  int64_t reach = 0;                 // 0: all keys
  const float* key_table = nullptr;  // of all heads, or null; see attention.h
  const float* query_table = nullptr;
  int64_t columns = 0;  // of the tables
  bool shared = false;  // one table for all heads

  bool hides(int64_t key) const { return reach > 0 && std::abs(key - query) > reach; }
  // Element d of the vector of a distance.
  double vector(const float* table, int64_t distance, int64_t d) const {
    const int64_t column = relative_origin(columns) + distance;
    const int64_t first = shared ? 0 : head * columns / 16;
    return table[((first + column / 16) * head_dim + d) * 16 + column % 16];
  }
  const float* q() const { return qkv + query * stride + head * head_dim; }
  const float* k(int64_t key) const { return qkv + key * stride + hidden + head * head_dim; }
  const float* v(int64_t key) const { return qkv + key * stride + 2 * hidden + head * head_dim; }
};

struct AttentionReference {
  std::vector<double> out, bound;
};

inline float round_to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  return std::bit_cast<float>(bits);
}

// Classes f32 and bf16_*.
inline AttentionReference float_reference(const AttentionRow& row, bool is_bf16) {
  const double u = kEpsilonF32;
  const int64_t len = row.len, dim = row.head_dim;
  const auto operand = [&](float x) { return static_cast<double>(is_bf16 ? round_to_bf16(x) : x); };
  std::vector<double> score(static_cast<size_t>(len)), error(score.size());
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < len; ++j) {
    if (row.hides(j)) {
      score[static_cast<size_t>(j)] = -std::numeric_limits<double>::infinity();
      continue;
    }
    double dot = 0, magnitude = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double product = operand(row.q()[d]) * operand(row.k(j)[d]);
      dot += product;
      magnitude += std::abs(product);
    }
    for (int64_t d = 0; d < dim; ++d) {
      double of_distance = 0;
      if (row.key_table != nullptr) {
        const double product = static_cast<double>(row.q()[d]) * row.vector(row.key_table, j - row.query, d);
        of_distance += product;
        magnitude += std::abs(product);
      }
      if (row.query_table != nullptr) {
        const double product =
            static_cast<double>(row.k(j)[d]) * row.vector(row.query_table, row.query - j, d);
        of_distance += product;
        magnitude += std::abs(product);
      }
      dot += of_distance;
    }
    const size_t at = static_cast<size_t>(j);
    score[at] = row.scale * dot;
    // Chains of head_dim terms, of which the last goes on from the sum of the others.
    error[at] = row.scale *
                dot_bound((row.key_table != nullptr || row.query_table != nullptr ? 6 : 2) * dim, magnitude);
    if (row.bias != nullptr) score[at] += row.bias[j - row.query];
    error[at] += 4 * u * (std::abs(row.scale * dot) + std::abs(score[at]));
    top = std::max(top, score[at]);
  }
  double sum = 0, worst = 0;
  for (size_t j = 0; j < score.size(); ++j) {
    if (row.hides(static_cast<int64_t>(j))) {
      score[j] = 0;
      continue;
    }
    // Powers of 2 take the logarithm of e along.
    error[j] = std::expm1(error[j] + (is_bf16 ? 4 * u * (std::abs(top) + std::abs(score[j]))
                                              : 3 * u * (top - score[j]))) +
               (is_bf16 ? 0x1p-9 + 4e-7 : 2.2 * u);
    worst = std::max(worst, error[j]);
    score[j] = std::exp(score[j] - top);
    sum += score[j];
  }
  AttentionReference result;
  for (int64_t d = 0; d < dim; ++d) {
    double value = 0, bound = 1e-44;
    for (int64_t j = 0; j < len; ++j) {
      const size_t at = static_cast<size_t>(j);
      const double v = operand(row.v(j)[d]);
      value += score[at] / sum * v;
      bound += score[at] / sum * std::abs(v) * (error[at] + worst + gamma_bound(2 * len + 8));
    }
    result.out.push_back(value);
    result.bound.push_back(1.001 * bound);
  }
  return result;
}

// What class s8 knows of one head of one sequence, the same for all of its queries.
struct CodedHead {
  std::vector<float> key_scale, value_centre, value_scale;  // [head_dim]
  std::vector<int> keys, values;                            // [len, head_dim]
};

inline CodedHead code_head(const AttentionRow& row) {
  CodedHead head;
  const size_t dims = static_cast<size_t>(row.head_dim), len = static_cast<size_t>(row.len);
  head.keys.resize(len * dims);
  head.values.resize(len * dims);
  const auto reciprocal = [](float levels, float extent) {
    const float found = levels / extent;
    return found < std::numeric_limits<float>::infinity() ? found : 0.0f;
  };
  for (size_t d = 0; d < dims; ++d) {
    float range[2][3];  // low, high, sum; of the key, of the value
    for (int64_t j = 0; j < row.len; ++j) {
      for (int which = 0; which < 2; ++which) {
        const float x = (which == 0 ? row.k(j) : row.v(j))[d];
        float(&r)[3] = range[which];
        r[0] = j == 0 ? x : std::min(r[0], x);
        r[1] = j == 0 ? x : std::max(r[1], x);
        r[2] = j == 0 ? x : r[2] + x;
      }
    }
    const float extent = (range[0][1] - range[0][0]) * 0.5f, centre = (range[0][1] + range[0][0]) * 0.5f;
    const float inverse = reciprocal(127.0f, extent);
    head.key_scale.push_back(inverse <= 0 ? 0 : extent / 127.0f);
    const float mean = range[1][2] / static_cast<float>(row.len);
    const float scale = std::max(range[1][1] - mean, mean - range[1][0]) / 127.0f;
    const float value_inverse = reciprocal(1.0f, scale);
    head.value_centre.push_back(mean);
    head.value_scale.push_back(scale);
    for (int64_t j = 0; j < row.len; ++j) {
      const size_t at = static_cast<size_t>(j) * dims + d;
      head.keys[at] = static_cast<int>(std::nearbyint((row.k(j)[d] - centre) * inverse));
      head.values[at] = static_cast<int>(std::nearbyint((row.v(j)[d] - mean) * value_inverse));
    }
  }
  return head;
}

inline AttentionReference coded_reference(const AttentionRow& row, const CodedHead& head) {
  constexpr int64_t kBlock = 1024;  // keys whose powers are codes of one largest
  const double u = kEpsilonF32;
  const size_t dims = static_cast<size_t>(row.head_dim);
  std::vector<float> q(dims);
  float largest = 0;
  for (size_t d = 0; d < dims; ++d) {
    q[d] = row.q()[d] * head.key_scale[d];
    largest = std::max(largest, std::abs(q[d]));
  }
  float inverse = 127.0f / largest;
  if (!(inverse < std::numeric_limits<float>::infinity())) inverse = 0;
  std::vector<int> codes(dims);
  for (size_t d = 0; d < dims; ++d) codes[d] = static_cast<int>(std::nearbyint(q[d] * inverse));

  const double factor = static_cast<double>(largest) / 127 * row.scale;
  std::vector<double> score(static_cast<size_t>(row.len)), magnitude(score.size());
  for (int64_t j = 0; j < row.len; ++j) {
    int64_t sum = 0;
    for (size_t d = 0; d < dims; ++d) sum += codes[d] * head.keys[static_cast<size_t>(j) * dims + d];
    const size_t at = static_cast<size_t>(j);
    if (row.hides(j)) {
      score[at] = -std::numeric_limits<double>::infinity();
      continue;
    }
    score[at] = static_cast<double>(sum) * factor;
    magnitude[at] = std::abs(score[at]);
    if (row.bias != nullptr) {
      score[at] += row.bias[j - row.query];
      magnitude[at] += std::abs(static_cast<double>(row.bias[j - row.query]));
    }
  }
  double sum = 0, worst = 0;
  std::vector<double> total(dims), doubt(dims);
  double top = -std::numeric_limits<double>::infinity(), top_magnitude = 0;
  for (int64_t begin = 0; begin < row.len; begin += kBlock) {
    const int64_t end = std::min(row.len, begin + kBlock);
    const double before = top;
    for (int64_t j = begin; j < end; ++j) {
      top = std::max(top, score[static_cast<size_t>(j)]);
      top_magnitude = std::max(top_magnitude, magnitude[static_cast<size_t>(j)]);
    }
    const double decay = begin == 0 ? 0 : std::exp(before - top);
    sum *= decay;
    for (size_t d = 0; d < dims; ++d) {
      total[d] *= decay;
      doubt[d] *= decay;
    }
    for (int64_t j = begin; j < end; ++j) {
      const size_t at = static_cast<size_t>(j);
      const double p = std::exp(std::max(score[at] - top, -60.0));
      const double error = 3.6e-6 + std::expm1(6 * u * (magnitude[at] + top_magnitude));
      worst = std::max(worst, error);
      sum += p;
      const double code = std::nearbyint(255 * p);
      const double range =
          std::nearbyint(255 * std::min(1.0, p * (1 + error))) - std::nearbyint(255 * p * (1 - error));
      for (size_t d = 0; d < dims; ++d) {
        const int value = head.values[at * dims + d];
        total[d] += code * value;
        doubt[d] += range * std::abs(value);
      }
    }
  }
  AttentionReference result;
  for (size_t d = 0; d < dims; ++d) {
    const double unit = static_cast<double>(head.value_scale[d]) / (255 * sum);
    const double out = total[d] * unit + static_cast<double>(head.value_centre[d]);
    // The sum of powers and, with several blocks, the decays carry the powers' own error.
    result.out.push_back(out);
    result.bound.push_back(
        doubt[d] * unit + std::abs(total[d]) * unit * (2.1 * worst + gamma_bound(row.len + 16)) +
        4 * u * (std::abs(out) + std::abs(static_cast<double>(head.value_centre[d]))) + 1e-44);
  }
  return result;
}

}  // namespace encast::testing
