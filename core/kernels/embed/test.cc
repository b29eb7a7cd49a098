#include "kernels/embed/embed.h"

#include "kernels/norm/reference.h"
#include "kernels/quantize/reference.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/embed/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/embed/kernels.inc"
#undef ENCAST_KERNEL
};

constexpr int64_t kTokens = 6, kVocab = 11, kPositions = 7, kTypes = 2;

struct Problem {
  Problem(int64_t cols, Rng& rng)
      : word(kVocab, cols),
        position(kPositions, cols),
        type(kTypes, cols),
        gamma(static_cast<size_t>(cols)),
        beta(static_cast<size_t>(cols)),
        token_ids(kTokens),
        type_ids(kTokens),
        positions(kTokens) {
    rng.fill_normal(word.buffer.span(), 0.3f, 1.0f);
    rng.fill_normal(position.buffer.span(), -0.1f, 0.4f);
    rng.fill_normal(type.buffer.span(), 0.2f, 0.2f);
    rng.fill_normal(gamma.span(), 1.0f, 0.3f);
    rng.fill_normal(beta.span(), 0.0f, 0.5f);
    rng.fill_integer(token_ids.span(), 0, kVocab - 1);
    rng.fill_integer(type_ids.span(), 0, kTypes - 1);
    rng.fill_integer(positions.span(), 0, kPositions - 1);
    token_ids[0] = kVocab - 1;  // the last rows end at a page without access
    type_ids[0] = kTypes - 1;
    positions[0] = kPositions - 1;
  }

  EmbedArgs args(bool with_type, bool with_position, bool with_norm) const {
    EmbedArgs args;
    args.cols = word.cols;
    args.token_ids = token_ids.data();
    args.word = word.data();
    if (with_type) {
      args.token_type_ids = type_ids.data();
      args.token_type = type.data();
    }
    if (with_position) {
      args.positions = positions.data();
      args.position = position.data();
    }
    if (with_norm) {
      args.gamma = gamma.data();
      args.beta = beta.data();
    }
    args.eps = 1e-12f;
    return args;
  }

  // The sum in f32, in the contract's order.
  std::vector<float> sum(size_t token, bool with_type, bool with_position) const {
    std::vector<float> row(static_cast<size_t>(word.cols));
    for (size_t j = 0; j < row.size(); ++j) {
      const int64_t col = static_cast<int64_t>(j);
      row[j] = word.at(token_ids[token], col);
      if (with_type) row[j] += type.at(type_ids[token], col);
      if (with_position) row[j] += position.at(positions[token], col);
    }
    return row;
  }

  GuardedMatrix<float> word, position, type;
  GuardedBuffer<float> gamma, beta;
  GuardedBuffer<int32_t> token_ids, type_ids, positions;
};

void check_case(const Problem& problem, bool with_type, bool with_position, bool with_norm,
                NarrowOut::Kind kind) {
  const int64_t cols = problem.word.cols;
  GuardedMatrix<float> first(kTokens, cols);
  bool is_first = true;
  for (const auto& kernel : runnable<EmbedFn>(kManifest, "embed_rows")) {
    const std::string note =
        std::string(kernel.name) + " cols=" + std::to_string(cols) + " type=" + std::to_string(with_type) +
        " position=" + std::to_string(with_position) + " norm=" + std::to_string(with_norm) +
        " kind=" + std::to_string(static_cast<int>(kind));
    GuardedMatrix<float> out(kTokens, cols, cols + 3);
    NarrowBuffers narrow(kind, kTokens, cols, (cols + 63) / 64 * 64);
    EmbedArgs args = problem.args(with_type, with_position, with_norm);
    args.out = out.data();
    args.out_stride = out.stride;
    args.narrow = narrow.out();
    kernel.fn(args, 0, 2);
    kernel.fn(args, 2, kTokens);
    CHECK(out.check_gaps() && narrow.check_gaps(), note);
    for (int64_t i = 0; i < kTokens; ++i) {
      const std::vector<float> sum = problem.sum(static_cast<size_t>(i), with_type, with_position);
      if (is_first) std::copy_n(out.row(i), cols, first.row(i));
      CHECK_SAME_BITS(first.row(i), out.row(i), sum.size(), note, " row ", i);
      narrow.check_row(i, out.row(i), cols, note);
      if (!with_norm) {
        CHECK_SAME_BITS(sum.data(), out.row(i), sum.size(), note, " row ", i);
        continue;
      }
      const ReferenceNorm want =
          reference_norm({sum.begin(), sum.end()}, std::vector<double>(sum.size(), 0.0), problem.gamma.data(),
                         problem.beta.data(), 1e-12);
      for (size_t j = 0; j < sum.size(); ++j) {
        // One column has no deviation: f32 gives beta exactly.
        if (cols > 1) {
          CHECK_LE(std::abs(out.at(i, static_cast<int64_t>(j)) - want.value[j]), want.bound[j], note, " row ",
                   i);
        } else {
          CHECK_EQ(out.at(i, 0), problem.beta[0], note);
        }
      }
    }
    is_first = false;
  }
}

void check_width(int64_t cols, Rng& rng) {
  const Problem problem(cols, rng);
  for (const bool with_type : {false, true}) {
    for (const bool with_position : {false, true}) {
      for (const bool with_norm : {false, true}) {
        for (const NarrowOut::Kind kind : kNarrowKinds) {
          check_case(problem, with_type, with_position, with_norm, kind);
        }
      }
    }
  }
}

}  // namespace

ENCAST_TEST(every_width_and_every_choice_of_tables) {
  Rng rng;
  for (int64_t cols = 1; cols <= 130; cols += cols < 20 ? 1 : 7) check_width(cols, rng);
  for (int64_t cols : {128, 312, 384, 768}) check_width(cols, rng);
}

ENCAST_TEST_MAIN
