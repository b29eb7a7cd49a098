#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"
#include "testing/tolerance.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/attention/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/attention/kernels.inc"
#undef ENCAST_KERNEL
};

auto kernels() { return runnable<AttentionFn>(kManifest, "attention"); }

// The whole batch between guard pages; scratch as large as promised and no larger.
struct Problem {
  Problem(std::vector<int32_t> lengths, int32_t heads, int32_t head_dim, bool with_bias, Rng& rng,
          float peak = 1.0f)
      : heads(heads),
        head_dim(head_dim),
        hidden(int64_t{heads} * head_dim),
        longest(*std::max_element(lengths.begin(), lengths.end())),
        cu(lengths.size() + 1),
        qkv(total(lengths), 3 * hidden, 3 * hidden + 3),
        bias(with_bias ? heads : 0, 2 * longest - 1),
        scratch(static_cast<size_t>(attention_scratch_bytes(longest, head_dim)) / sizeof(float)) {
    cu[0] = 0;
    for (size_t s = 0; s < lengths.size(); ++s) cu[s + 1] = cu[s] + lengths[s];
    rng.fill_normal(qkv.buffer.span());
    for (int64_t t = 0; t < qkv.rows; ++t) {
      for (int64_t j = 0; j < hidden; ++j) qkv.at(t, j) *= peak;
    }
    rng.fill_normal(bias.buffer.span(), 0.0f, 2.0f);
  }

  static int64_t total(const std::vector<int32_t>& lengths) {
    int64_t sum = 0;
    for (const int32_t length : lengths) sum += length;
    return sum;
  }

  int64_t seqs() const { return static_cast<int64_t>(cu.size()) - 1; }
  int64_t length(int64_t seq) const {
    return cu[static_cast<size_t>(seq) + 1] - cu[static_cast<size_t>(seq)];
  }

  AttentionArgs args(GuardedMatrix<float>& out, bool exact = false) const {
    AttentionArgs args;
    args.qkv = qkv.data();
    args.qkv_stride = qkv.stride;
    args.cu_seqlens = cu.data();
    args.heads = heads;
    args.head_dim = head_dim;
    args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
    args.bias = bias.rows == 0 ? nullptr : bias.data();
    args.bias_len = longest;
    args.out = out.data();
    args.out_stride = out.stride;
    args.exact = exact;
    return args;
  }

  void run(const KernelUnderTest<AttentionFn>& kernel, GuardedMatrix<float>& out, bool exact = false) {
    const AttentionArgs all = args(out, exact);
    for (int64_t s = 0; s < seqs(); ++s) {
      for (int64_t h = 0; h < heads; ++h) kernel.fn(all, s, h, 0, length(s), scratch.data());
    }
  }

  int32_t heads, head_dim;
  int64_t hidden, longest;
  GuardedBuffer<int32_t> cu;
  GuardedMatrix<float> qkv, bias;
  GuardedBuffer<float> scratch;
};

// One row of one head in double, and how far f32 may be from it.
//
// A score is off by the dot product's bound, the scale and the bias; a power by that exponent's error and by
// its own 1.1 ulp; the sum of powers and the context are sums of len terms. The maximum cancels: powers and
// their sum use the same.
void check_row(const Problem& problem, const GuardedMatrix<float>& out, int64_t seq, int64_t head,
               int64_t query, const std::string& note) {
  const int64_t first = problem.cu[static_cast<size_t>(seq)], len = problem.length(seq),
                dim = problem.head_dim;
  const double u = kEpsilonF32, scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  const float* q = problem.qkv.row(first + query) + head * dim;
  std::vector<double> score(static_cast<size_t>(len)), error(score.size());
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < len; ++j) {
    const float* k = problem.qkv.row(first + j) + problem.hidden + head * dim;
    double dot = 0, magnitude = 0;
    for (int64_t d = 0; d < dim; ++d) {
      dot += static_cast<double>(q[d]) * k[d];
      magnitude += std::abs(static_cast<double>(q[d]) * k[d]);
    }
    const size_t index = static_cast<size_t>(j);
    score[index] = scale * dot;
    error[index] = scale * dot_bound(dim, magnitude);
    if (problem.bias.rows != 0) score[index] += problem.bias.at(head, j - query + problem.longest - 1);
    error[index] += u * std::abs(score[index]);
    top = std::max(top, score[index]);
  }
  double sum = 0, worst = 0;
  for (size_t j = 0; j < score.size(); ++j) {
    error[j] = std::expm1(error[j] + u * (top - score[j])) + 2.2 * u;
    worst = std::max(worst, error[j]);
    score[j] = std::exp(score[j] - top);
    sum += score[j];
  }
  for (int64_t d = 0; d < dim; ++d) {
    double value = 0, bound = 1e-44;
    for (int64_t j = 0; j < len; ++j) {
      const size_t index = static_cast<size_t>(j);
      const double v = problem.qkv.row(first + j)[2 * problem.hidden + head * dim + d];
      value += score[index] / sum * v;
      bound += score[index] / sum * std::abs(v) * (error[index] + worst + gamma_bound(2 * len + 4));
    }
    CHECK_LE(std::abs(out.at(first + query, head * dim + d) - value), 1.001 * bound, note, " seq ", seq,
             " head ", head, " query ", query, " column ", d);
  }
}

void check_problem(Problem& problem, const std::string& what) {
  for (const bool exact : {false, true}) {
    GuardedMatrix<float> first(problem.qkv.rows, problem.hidden);
    bool is_first = true;
    for (const auto& kernel : kernels()) {
      const std::string note = std::string(kernel.name) + ' ' + what + " exact=" + std::to_string(exact);
      GuardedMatrix<float> out(problem.qkv.rows, problem.hidden, problem.hidden + 5);
      problem.run(kernel, out, exact);
      CHECK(out.check_gaps() && problem.scratch.check_slack(), note);
      for (int64_t t = 0; t < out.rows; ++t) {
        if (is_first) std::copy_n(out.row(t), out.cols, first.row(t));
        CHECK_SAME_BITS(first.row(t), out.row(t), static_cast<size_t>(out.cols), note, " token ", t);
      }
      if (is_first) {
        for (int64_t s = 0; s < problem.seqs(); ++s) {
          // Long sequences: rows at both ends and some between tell as much as all.
          const int64_t step = problem.length(s) > 70 ? 41 : 1;
          for (int64_t h = 0; h < problem.heads; ++h) {
            for (int64_t q = 0; q < problem.length(s); q += step) check_row(problem, out, s, h, q, note);
            check_row(problem, out, s, h, problem.length(s) - 1, note);
          }
        }
      }
      is_first = false;
    }
  }
}

void check_shape(int32_t len, int32_t head_dim, bool with_bias, Rng& rng, float peak = 1.0f) {
  Problem problem({3, len, 1}, 2, head_dim, with_bias, rng, peak);
  check_problem(problem, "len=" + std::to_string(len) + " head_dim=" + std::to_string(head_dim) +
                             " bias=" + std::to_string(with_bias));
}

}  // namespace

ENCAST_TEST(every_length) {
  Rng rng;
  const int32_t dims[] = {32, 64, 8, 33, 16, 1, 80};
  for (int32_t len = 1; len <= 70; ++len) check_shape(len, dims[len % 7], len % 2 == 0, rng);
}

ENCAST_TEST(every_head_dim) {
  Rng rng(1);
  for (const int32_t head_dim : {1, 8, 16, 31, 32, 33, 64, 80, 128, 200, 256}) {
    for (const int32_t len : {1, 17, 64, 65}) check_shape(len, head_dim, head_dim % 2 == 1, rng);
  }
}

// Above 128 keys the context waits in the scratch between passes, above 1024 a block has fewer queries.
ENCAST_TEST(long_sequences) {
  Rng rng(2);
  check_shape(128, 32, false, rng);
  check_shape(129, 64, true, rng);
  check_shape(500, 64, false, rng);
  check_shape(1100, 8, true, rng);
}

// Above 4096 keys the scores outgrow their share of L2, and the scratch with them.
ENCAST_TEST(a_very_long_sequence) {
  Rng rng(7);
  Problem problem({5000}, 1, 3, false, rng);
  for (const auto& kernel : kernels()) {
    GuardedMatrix<float> out(5000, 3);
    kernel.fn(problem.args(out), 0, 0, 4980, 5000, problem.scratch.data());
    CHECK(problem.scratch.check_slack(), kernel.name);
    for (int64_t q = 4980; q < 5000; ++q) check_row(problem, out, 0, 0, q, kernel.name);
  }
}

// Exact powers round differently from the polynomial's somewhere, or the flag is not heard.
ENCAST_TEST(exact_is_another_arithmetic) {
  Rng rng(8);
  Problem problem({64}, 2, 32, false, rng);
  for (const auto& kernel : kernels()) {
    GuardedMatrix<float> fast(64, 64), exact(64, 64);
    problem.run(kernel, fast, false);
    problem.run(kernel, exact, true);
    CHECK(!std::equal(fast.buffer.begin(), fast.buffer.end(), exact.buffer.begin()), kernel.name);
  }
}

// Scores far apart: without the maximum taken off, exp would overflow.
ENCAST_TEST(peaked_scores) {
  Rng rng(3);
  for (const float peak : {1e-3f, 30.0f, 300.0f}) check_shape(50, 32, false, rng, peak);
}

ENCAST_TEST(bits_depend_on_the_sequence_alone) {
  Rng rng(4);
  Problem together({20, 75, 9}, 3, 32, true, rng);
  for (const auto& kernel : kernels()) {
    GuardedMatrix<float> out(together.qkv.rows, together.hidden);
    together.run(kernel, out);

    // The second sequence among poisoned neighbours.
    Problem poisoned({20, 75, 9}, 3, 32, true, rng);
    std::copy_n(together.bias.data(), together.bias.buffer.size(), poisoned.bias.data());
    for (int64_t t = 0; t < poisoned.qkv.rows; ++t) {
      const bool mine = t >= 20 && t < 95;
      for (int64_t j = 0; j < poisoned.qkv.cols; ++j) {
        poisoned.qkv.at(t, j) = mine ? together.qkv.at(t, j) : std::numeric_limits<float>::quiet_NaN();
      }
    }
    std::fill(poisoned.scratch.begin(), poisoned.scratch.end(), std::numeric_limits<float>::quiet_NaN());
    GuardedMatrix<float> alone(poisoned.qkv.rows, poisoned.hidden);
    const AttentionArgs args = poisoned.args(alone);
    for (int64_t h = 0; h < 3; ++h) {
      // In pieces, as callers with many threads do.
      for (const auto& [begin, end] : {std::pair{0, 1}, {1, 7}, {7, 7}, {7, 60}, {60, 75}}) {
        kernel.fn(args, 1, h, begin, end, poisoned.scratch.data());
      }
    }
    CHECK_SAME_BITS(out.row(20), alone.row(20), static_cast<size_t>(75 * alone.cols), kernel.name);
    CHECK(alone.untouched(0, 0, 20 * alone.cols) && alone.untouched(95, 0, 9 * alone.cols), kernel.name);
  }
}

ENCAST_TEST(a_call_writes_its_head_and_queries_only) {
  Rng rng(5);
  Problem problem({40}, 3, 33, false, rng);
  for (const auto& kernel : kernels()) {
    GuardedMatrix<float> out(40, problem.hidden, problem.hidden + 1);
    kernel.fn(problem.args(out), 0, 1, 10, 30, problem.scratch.data());
    CHECK(out.check_gaps(), kernel.name);
    for (int64_t t = 0; t < 40; ++t) {
      CHECK(out.untouched(t, 0, 33) && out.untouched(t, 66, 99), kernel.name, " token ", t);
      CHECK_EQ(out.untouched(t, 33, 66), t < 10 || t >= 30, kernel.name, " token ", t);
    }
  }
}

// A table longer than the sequence is read around its middle.
ENCAST_TEST(bias_is_relative_to_the_middle_of_its_table) {
  Rng rng(6);
  Problem shorter({12}, 2, 16, true, rng);
  Problem longer({12, 90}, 2, 16, true, rng);
  for (int64_t t = 0; t < 12; ++t) std::copy_n(shorter.qkv.row(t), shorter.qkv.cols, longer.qkv.row(t));
  for (int64_t h = 0; h < 2; ++h) std::copy_n(shorter.bias.row(h), 23, longer.bias.row(h) + 90 - 12);
  for (const auto& kernel : kernels()) {
    GuardedMatrix<float> a(12, 32), b(102, 32);
    shorter.run(kernel, a);
    longer.run(kernel, b);
    CHECK_SAME_BITS(a.data(), b.data(), a.buffer.size(), kernel.name);
  }
}

ENCAST_TEST(scratch_grows_with_the_length) {
  for (const int64_t head_dim : {1, 32, 64, 256}) {
    int64_t last = 0;
    for (int64_t len = 1; len <= 9000; ++len) {
      const int64_t bytes = attention_scratch_bytes(len, head_dim);
      CHECK(bytes >= last && bytes % 64 == 0, "len=", len);
      last = bytes;
    }
  }
}

ENCAST_TEST_MAIN
