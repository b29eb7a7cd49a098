#pragma once
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/gemm/reference.h"
#include "testing/check.h"
#include "testing/guard.h"
#include "testing/random.h"

// Random operands of a product and the memory for its outputs: what the tests of the family share.
namespace encast::testing {

struct Spec {
  int64_t m = 1, n = 1, k = 1;
  bool bias = false, residual = false;
  bool symmetric = true;  // q8 rows have zero point 128
  Activation activation = Activation::none;
  bool exact = false, coarse = false;
  uint64_t seed = 0;
};

// Every operand ends at a guard page, so that a kernel that reads beyond its contract faults.
class Problem {
 public:
  Problem(GemmOperands operands, const Spec& spec)
      : operands_(operands),
        spec_(spec),
        element_(operands == GemmOperands::f32    ? 4
                 : operands == GemmOperands::bf16 ? 2
                                                  : 1),
        k_padded_((spec.k + 4 / element_ - 1) / (4 / element_) * (4 / element_)),
        a_stride_(k_padded_ + 4 / element_ * static_cast<int64_t>(spec.seed % 3)),
        a_(static_cast<size_t>(((spec.m - 1) * a_stride_ + k_padded_) * element_)),
        a_scale_(static_cast<size_t>(spec.m)),
        a_zero_(static_cast<size_t>(spec.m)),
        w_(static_cast<size_t>(spec.n * spec.k * element_)),
        packed_(static_cast<size_t>(gemm_packed_bytes(operands, spec.n, spec.k))),
        w_scale_(columns_padded()),
        w_colsum_(columns_padded()),
        bias_(columns_padded()),
        residual_(static_cast<size_t>((spec.m - 1) * residual_stride() + spec.n)) {
    Rng rng(spec.seed + 1000);
    fill(rng, a_.data(), a_.size() / static_cast<size_t>(element_), 0, 255);
    fill(rng, w_.data(), w_.size() / static_cast<size_t>(element_), -127, 127);
    for (float& scale : a_scale_) scale = rng.uniform(0.001f, 0.02f);
    for (int32_t& zero : a_zero_) zero = spec.symmetric ? 128 : static_cast<int32_t>(rng.integer(0, 255));
    std::fill(w_scale_.begin(), w_scale_.end(), 0.0f);
    std::fill(bias_.begin(), bias_.end(), 0.0f);
    for (int64_t j = 0; j < spec.n; ++j) {
      w_scale_[static_cast<size_t>(j)] = rng.uniform(0.001f, 0.02f);
      bias_[static_cast<size_t>(j)] = rng.normal();
    }
    rng.fill_normal(residual_.span());
    pack();
  }

  const Spec& spec() const { return spec_; }

  GemmArgs args(float* c, int64_t c_stride) const {
    GemmArgs args{.m = spec_.m, .n = spec_.n, .k = spec_.k, .a = a_.data(), .a_stride = a_stride_};
    if (operands_ == GemmOperands::q8s8) {
      args.a_scale = a_scale_.data();
      args.a_zero = a_zero_.data();
      args.w_scale = w_scale_.data();
      args.w_colsum = w_colsum_.data();
    }
    args.w = packed_.data();
    args.bias = spec_.bias ? bias_.data() : nullptr;
    args.residual = spec_.residual ? residual_.data() : nullptr;
    args.residual_stride = residual_stride();
    args.c = c;
    args.c_stride = c_stride;
    args.activation = spec_.activation;
    args.exact = spec_.exact;
    args.coarse = spec_.coarse;
    // Prefetched at most: at its end begins a guard page.
    args.next_w = packed_.data() + packed_.size();
    args.next_w_bytes = 3 * kPanel * spec_.k;
    return args;
  }

  GemmReference reference(bool fma_in_order) const {
    return gemm_reference(operands_, args(nullptr, 0), w_.data(), fma_in_order);
  }

  GemmReference reference_of_row(int64_t row, bool fma_in_order) const {
    GemmArgs one = args(nullptr, 0);
    one.m = 1;
    one.a = a_.data() + row * a_stride_ * element_;
    if (one.a_scale != nullptr) one.a_scale += row;
    if (one.a_zero != nullptr) one.a_zero += row;
    if (one.residual != nullptr) one.residual += row * one.residual_stride;
    return gemm_reference(operands_, one, w_.data(), fma_in_order);
  }

  void fill_bytes(uint8_t a, int8_t w) {
    std::fill(a_.begin(), a_.end(), a);
    std::fill(w_.begin(), w_.end(), static_cast<uint8_t>(w));
    pack();
  }
  void fill_floats(float a, float w) {
    for (size_t i = 0; i < a_.size(); i += sizeof a) std::memcpy(a_.data() + i, &a, sizeof a);
    for (size_t i = 0; i < w_.size(); i += sizeof w) std::memcpy(w_.data() + i, &w, sizeof w);
    pack();
  }

  // NaN in the row's first element, or another value where there is no NaN.
  void poison_row(int64_t row) {
    uint8_t* element = a_.data() + row * a_stride_ * element_;
    if (operands_ == GemmOperands::q8s8) {
      *element ^= 0xff;
      a_scale_[static_cast<size_t>(row)] = 1e30f;
      a_zero_[static_cast<size_t>(row)] = 7;
    } else {
      std::memset(element, 0x7f, static_cast<size_t>(element_));
      element[element_ - 2] = 0xff;
    }
  }

  std::string describe() const {
    std::ostringstream text;
    text << "m=" << spec_.m << " n=" << spec_.n << " k=" << spec_.k << " bias=" << spec_.bias
         << " residual=" << spec_.residual << " symmetric=" << spec_.symmetric
         << " activation=" << static_cast<int>(spec_.activation) << " exact=" << spec_.exact
         << " coarse=" << spec_.coarse;
    return text.str();
  }

 private:
  size_t columns_padded() const { return static_cast<size_t>((spec_.n + kPanel - 1) / kPanel * kPanel); }
  int64_t residual_stride() const { return spec_.n + static_cast<int64_t>(spec_.seed % 2); }

  // Finite values in what lies between and behind the rows too: the contract lets a kernel multiply them by
  // the zeros that pad the weights.
  void fill(Rng& rng, uint8_t* bytes, size_t n, int64_t low, int64_t high) {
    for (size_t i = 0; i < n; ++i) {
      if (operands_ == GemmOperands::q8s8) {
        bytes[i] = static_cast<uint8_t>(rng.integer(low, high));
        continue;
      }
      float value = rng.normal();
      if (rng.integer(0, 40) == 0) value *= 300.0f;  // an outlier channel
      uint8_t raw[4];
      std::memcpy(raw, &value, 4);
      const size_t size = static_cast<size_t>(element_);
      std::memcpy(bytes + i * size, raw + 4 - size, size);  // bf16 is the upper half
    }
  }

  void pack() {
    gemm_pack(operands_, w_.data(), spec_.n, spec_.k, packed_.data());
    std::fill(w_colsum_.begin(), w_colsum_.end(), 0);
    if (operands_ != GemmOperands::q8s8) return;
    for (int64_t j = 0; j < spec_.n; ++j) {
      for (int64_t k = 0; k < spec_.k; ++k) {
        w_colsum_[static_cast<size_t>(j)] += static_cast<int8_t>(w_[static_cast<size_t>(j * spec_.k + k)]);
      }
    }
  }

  GemmOperands operands_;
  Spec spec_;
  int64_t element_, k_padded_, a_stride_;
  GuardedBuffer<uint8_t> a_;
  GuardedBuffer<float> a_scale_;
  GuardedBuffer<int32_t> a_zero_;
  std::vector<uint8_t> w_;
  GuardedBuffer<uint8_t> packed_;
  GuardedBuffer<float> w_scale_;
  GuardedBuffer<int32_t> w_colsum_;
  GuardedBuffer<float> bias_, residual_;
};

// The outputs of a problem, with columns between the rows that nobody may write.
class Outputs {
 public:
  explicit Outputs(const Problem& problem)
      : problem_(problem),
        stride_(problem.spec().n + 5),
        c_(static_cast<size_t>((problem.spec().m - 1) * stride_ + problem.spec().n)) {
    std::memset(c_.data(), kUntouched, c_.size() * sizeof(float));
  }

  float at(int64_t row, int64_t column) const { return c_[static_cast<size_t>(row * stride_ + column)]; }

  void run(GemmFn fn) { run(fn, 0, problem_.spec().m, 0, (problem_.spec().n + kPanel - 1) / kPanel); }
  void run(GemmFn fn, int64_t m_begin, int64_t m_end, int64_t panel_begin, int64_t panel_end) {
    fn(problem_.args(c_.data(), stride_), m_begin, m_end, panel_begin, panel_end);
    CHECK(c_.check_slack(), problem_.describe());
    check_untouched_outside(0, problem_.spec().m, 0, problem_.spec().n);
  }

  // All outputs but those of the rows and columns given still hold what they began with.
  void check_untouched_outside(int64_t m_begin, int64_t m_end, int64_t n_begin, int64_t n_end) const {
    float untouched;
    std::memset(&untouched, kUntouched, sizeof untouched);
    for (size_t i = 0; i < c_.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / stride_, column = static_cast<int64_t>(i) % stride_;
      const bool inside = row >= m_begin && row < m_end && column >= n_begin && column < n_end;
      CHECK(inside || std::memcmp(&c_[i], &untouched, sizeof untouched) == 0, "row=", row, " column=", column,
            " ", problem_.describe());
    }
  }
  void check_same(const Outputs& other) const {
    for (int64_t row = 0; row < problem_.spec().m; ++row) check_same_row(other, row);
  }
  void check_same_row(const Outputs& other, int64_t row) const {
    CHECK_SAME_BITS(&c_[static_cast<size_t>(row * stride_)], &other.c_[static_cast<size_t>(row * stride_)],
                    static_cast<size_t>(problem_.spec().n), "row=", row, " ", problem_.describe());
  }

 private:
  static constexpr int kUntouched = 0xc7;
  const Problem& problem_;
  int64_t stride_;
  GuardedBuffer<float> c_;
};

}  // namespace encast::testing
