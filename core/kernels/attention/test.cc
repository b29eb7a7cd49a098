#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/narrow_impl.h"
#include "kernels/attention/reference.h"
#include "kernels/attention/scratch.h"
#include "testing/amx_stand_in.h"
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

// The tiles' source on a stand-in for their instructions, which every machine may run.
struct StandInProducts : TileProducts {
  using Tiles = AmxStandIn;
  ENCAST_SIMD I32x16 round_pair(F32x16 a, F32x16 b) {
    const I32x16 codes[2] = {to_bf16(a), to_bf16(b)};
    return pack_codes<false>(codes);
  }
  ENCAST_SIMD I32x16 interleave_pair(I32x16 codes) {
    const I32x16 halves[2] = {sixteen_of(codes, 0), sixteen_of(codes, 1)};
    return interleave_codes(halves);
  }

 private:
  // Lane i: code i of the first or the second sixteen.
  ENCAST_SIMD I32x16 sixteen_of(I32x16 codes, int which) {
    int32_t groups[16];
    uint16_t all[32];
    store_i32(groups, codes);
    std::memcpy(all, groups, sizeof all);
    for (int i = 0; i < 16; ++i) groups[i] = all[16 * which + i];
    return load_i32(groups);
  }
};
void attention_bf16_stand_in(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                             int64_t query_end, void* scratch) {
  narrow_attention<StandInProducts>(args, seq, head, query_begin, query_end, scratch);
}

struct Kernel {
  const char* name;
  std::string arithmetic;
  AttentionFn fn;
};

// The kernels that this machine may run, by class; the others are named once on stdout.
const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> found = [] {
    const struct {
      const char *name, *arithmetic;
      Isa isa;
      AttentionFn fn;
    } manifest[] = {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) {#name, #arithmetic, Isa::isa, &name},
#include "kernels/attention/kernels.inc"
#undef ENCAST_KERNEL
    };
    std::vector<Kernel> runnable = {{"attention_bf16_stand_in", "bf16_stand_in", attention_bf16_stand_in}};
    for (const auto& row : manifest) {
      if (isa_allowed(row.isa)) {
        runnable.push_back({row.name, row.arithmetic, row.fn});
      } else {
        std::printf("SKIP %s: this machine or ENCAST_ISA does not allow %s\n", row.name, isa_name(row.isa));
      }
    }
    return runnable;
  }();
  return found;
}

// The whole batch between guard pages; scratch as large as promised and no larger.
struct Problem {
  // tables: 1 of keys, 2 of queries, 3 both; shared: of all heads.
  Problem(std::vector<int32_t> lengths, int32_t heads, int32_t head_dim, bool with_bias, Rng& rng,
          float peak = 1.0f, int tables = 0, bool shared = false)
      : heads(heads),
        head_dim(head_dim),
        hidden(int64_t{heads} * head_dim),
        longest(*std::max_element(lengths.begin(), lengths.end())),
        shared(shared),
        cu(lengths.size() + 1),
        qkv(total(lengths), 3 * hidden, 3 * hidden + 3),
        bias(with_bias ? heads : 0, 2 * longest - 1),
        key_table(tables & 1 ? (shared ? head_dim : hidden) * relative_columns(longest) / 16 : 0, 16),
        query_table(tables & 2 ? (shared ? head_dim : hidden) * relative_columns(longest) / 16 : 0, 16),
        scratch(scratch_floats(longest, head_dim, tables != 0)) {
    cu[0] = 0;
    for (size_t s = 0; s < lengths.size(); ++s) cu[s + 1] = cu[s] + lengths[s];
    rng.fill_normal(qkv.buffer.span());
    for (int64_t t = 0; t < qkv.rows; ++t) {
      for (int64_t j = 0; j < hidden; ++j) qkv.at(t, j) *= peak;
    }
    rng.fill_normal(bias.buffer.span(), 0.0f, 2.0f);
    rng.fill_normal(key_table.buffer.span());
    rng.fill_normal(query_table.buffer.span());
  }

  // With tables only f32 runs, and the promise is larger for the sake of narrow classes.
  static size_t scratch_floats(int64_t len, int64_t head_dim, bool with_tables) {
    const int64_t promised =
        attention_scratch_bytes(len, head_dim, with_tables) / static_cast<int64_t>(sizeof(float));
    const int64_t needed = scratch_parts(len, head_dim).floats() + distance_parts(len, head_dim).floats();
    CHECK(!with_tables || needed <= promised, "len=", len);
    return static_cast<size_t>(with_tables ? needed : promised);
  }

  static int64_t total(const std::vector<int32_t>& lengths) {
    int64_t sum = 0;
    for (const int32_t length : lengths) sum += length;
    return sum;
  }

  bool has_tables() const { return key_table.rows > 0 || query_table.rows > 0; }
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
    args.reach = reach;
    args.seen = seen.empty() ? nullptr : seen.data();
    args.key_table = key_table.rows == 0 ? nullptr : key_table.data();
    args.query_table = query_table.rows == 0 ? nullptr : query_table.data();
    args.table_columns = has_tables() ? relative_columns(longest) : 0;
    args.shared_tables = shared;
    args.out = out.data();
    args.out_stride = out.stride;
    args.exact = exact;
    return args;
  }

  void run(const Kernel& kernel, GuardedMatrix<float>& out, bool exact = false) {
    const AttentionArgs all = args(out, exact);
    for (int64_t s = 0; s < seqs(); ++s) {
      for (int64_t h = 0; h < heads; ++h) kernel.fn(all, s, h, 0, length(s), scratch.data());
    }
  }

  int32_t heads, head_dim;
  int64_t hidden, longest, reach = 0;
  bool shared;
  std::vector<int32_t> seen;  // empty: all
  GuardedBuffer<int32_t> cu;
  GuardedMatrix<float> qkv, bias, key_table, query_table;
  GuardedBuffer<float> scratch;
};

// Some rows of a head against the reference of the kernel's class.
void check_rows(const Problem& problem, const GuardedMatrix<float>& out, const Kernel& kernel, int64_t seq,
                int64_t head, const std::vector<int64_t>& queries, const std::string& note) {
  AttentionRow row;
  const int64_t first = problem.cu[static_cast<size_t>(seq)];
  row.stride = problem.qkv.stride;
  row.hidden = problem.hidden;
  row.head = head;
  row.head_dim = problem.head_dim;
  row.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(problem.head_dim)));
  row.bias = problem.bias.rows == 0 ? nullptr : problem.bias.row(head) + problem.longest - 1;
  row.reach = problem.reach;
  row.columns = relative_columns(problem.longest);
  row.shared = problem.shared;
  row.key_table = problem.key_table.rows == 0 ? nullptr : problem.key_table.data();
  row.query_table = problem.query_table.rows == 0 ? nullptr : problem.query_table.data();
  const bool coded = kernel.arithmetic == "s8";
  CodedHead codes;
  int64_t coded_block = -1;
  for (const int64_t query : queries) {
    // With a reach, blocks of 128 queries know the keys that any of theirs reaches, and are coded with those.
    const int64_t block = query / 128 * 128, reach = problem.reach;
    const int64_t len = problem.seen.empty() ? problem.length(seq) : problem.seen[static_cast<size_t>(seq)];
    const int64_t begin = reach == 0 ? 0 : std::max<int64_t>(block - reach, 0);
    row.qkv = problem.qkv.row(first + begin);
    row.len = (reach == 0 ? len : std::min(block + 128 + reach, len)) - begin;
    row.query = query - begin;
    if (coded && (coded_block < 0 || (reach > 0 && coded_block != block))) codes = code_head(row);
    coded_block = block;
    const AttentionReference want =
        coded ? coded_reference(row, codes) : float_reference(row, kernel.arithmetic != "f32");
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      const size_t at = static_cast<size_t>(d);
      CHECK_LE(std::abs(out.at(first + query, head * problem.head_dim + d) - want.out[at]), want.bound[at],
               note, " seq ", seq, " head ", head, " query ", query, " column ", d);
    }
  }
}

void check_problem(Problem& problem, const std::string& what) {
  for (const bool exact : {false, true}) {
    std::map<std::string, GuardedMatrix<float>> first_of;  // of every class
    for (const Kernel& kernel : kernels()) {
      if (problem.has_tables() && kernel.arithmetic != "f32") continue;
      const std::string note = std::string(kernel.name) + ' ' + what + " exact=" + std::to_string(exact);
      GuardedMatrix<float> out(problem.qkv.rows, problem.hidden, problem.hidden + 5);
      problem.run(kernel, out, exact);
      CHECK(out.check_gaps() && problem.scratch.check_slack(), note);
      const auto [known, is_first] =
          first_of.try_emplace(kernel.arithmetic, problem.qkv.rows, problem.hidden);
      GuardedMatrix<float>& first = known->second;
      for (int64_t t = 0; t < out.rows; ++t) {
        if (is_first) std::copy_n(out.row(t), out.cols, first.row(t));
        CHECK_SAME_BITS(first.row(t), out.row(t), static_cast<size_t>(out.cols), note, " token ", t);
      }
      if (!is_first) continue;
      for (int64_t s = 0; s < problem.seqs(); ++s) {
        // Long sequences: rows at both ends and some between tell as much as all.
        std::vector<int64_t> queries;
        for (int64_t q = 0; q<problem.length(s); q += problem.length(s)> 70 ? 41 : 1) queries.push_back(q);
        queries.push_back(problem.length(s) - 1);
        for (int64_t h = 0; h < problem.heads; ++h) check_rows(problem, out, kernel, s, h, queries, note);
      }
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
  for (const Kernel& kernel : kernels()) {
    GuardedMatrix<float> out(5000, 3);
    kernel.fn(problem.args(out), 0, 0, 4980, 5000, problem.scratch.data());
    CHECK(problem.scratch.check_slack(), kernel.name);
    std::vector<int64_t> queries;
    for (int64_t q = 4980; q < 5000; ++q) queries.push_back(q);
    check_rows(problem, out, kernel, 0, 0, queries, kernel.name);
  }
}

// Exact powers round differently from the polynomial's somewhere, or the flag is not heard. Rounding to bf16
// hides the last bits of a power.
ENCAST_TEST(exact_is_another_arithmetic) {
  Rng rng(8);
  Problem problem({64}, 2, 32, false, rng);
  for (const Kernel& kernel : kernels()) {
    if (kernel.arithmetic.starts_with("bf16")) continue;
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
  for (const Kernel& kernel : kernels()) {
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

// Queries that stand in one block of the whole and in another of the pieces; with 1100 keys there are two
// blocks of keys.
ENCAST_TEST(bits_do_not_depend_on_the_blocks) {
  Rng rng(11);
  for (const int32_t len : {300, 1100}) {
    Problem problem({len}, 1, 40, len == 300, rng);
    for (const Kernel& kernel : kernels()) {
      GuardedMatrix<float> whole(len, 40), pieces(len, 40);
      problem.run(kernel, whole);
      for (const auto& [begin, end] : {std::pair{0, 5}, {5, 127}, {127, 129}, {129, len}}) {
        kernel.fn(problem.args(pieces), 0, 0, begin, end, problem.scratch.data());
      }
      CHECK_SAME_BITS(whole.data(), pieces.data(), whole.buffer.size(), kernel.name, " len ", len);
    }
  }
}

ENCAST_TEST(a_call_writes_its_head_and_queries_only) {
  Rng rng(5);
  Problem problem({40}, 3, 33, false, rng);
  for (const Kernel& kernel : kernels()) {
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
  for (const Kernel& kernel : kernels()) {
    GuardedMatrix<float> a(12, 32), b(102, 32);
    shorter.run(kernel, a);
    longer.run(kernel, b);
    CHECK_SAME_BITS(a.data(), b.data(), a.buffer.size(), kernel.name);
  }
}

// An answer may be anything then, but it says so: NaN or infinity where f32 arithmetic has it, and no crash.
ENCAST_TEST(numbers_that_are_none) {
  Rng rng(9);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {nan, inf, -inf, 3e38f, -3e38f, 1e-42f}) {
    for (int part = 0; part < 3; ++part) {
      Problem problem({9, 70}, 2, 33, part == 1, rng);
      problem.qkv.at(20, part * problem.hidden + 5) = bad;
      for (const Kernel& kernel : kernels()) {
        GuardedMatrix<float> out(79, problem.hidden, problem.hidden + 5);
        problem.run(kernel, out);
        CHECK(out.check_gaps() && problem.scratch.check_slack(), kernel.name);
        if (std::isnan(bad)) {
          CHECK(std::isnan(out.at(20, 5)), kernel.name, " part ", part);
          if (part > 0) CHECK(std::isnan(out.at(60, 5)), kernel.name, " part ", part);
        }
        for (int64_t t = 0; t < 9; ++t) {
          for (int64_t j = 0; j < out.cols; ++j) CHECK(std::isfinite(out.at(t, j)), kernel.name);
        }
        for (int64_t t = 9; t < 79; ++t) {
          for (int64_t j = 33; j < 66; ++j) CHECK(std::isfinite(out.at(t, j)), kernel.name);
        }
      }
    }
  }
}

// Columns and rows without extent: one token, equal tokens, zeros.
ENCAST_TEST(nothing_to_code) {
  Rng rng(10);
  for (const float value : {0.0f, -3.25f}) {
    Problem problem({1, 30}, 2, 20, false, rng);
    for (float& x : problem.qkv.buffer) x = value;
    for (const Kernel& kernel : kernels()) {
      GuardedMatrix<float> out(31, 40);
      problem.run(kernel, out);
      for (const float x : out.buffer) CHECK_LE(std::abs(x - value), 1e-5, kernel.name);
    }
  }
}

// Shorter than a block, at its end, in the second and third one; a reach of one key, of a vector, of more
// than the text; and one with more than 1024 keys around a block.
ENCAST_TEST(local_attention_sees_its_reach) {
  Rng rng(12);
  for (const auto& [len, reach] : {std::pair{1, 1},
                                   {2, 1},
                                   {17, 3},
                                   {40, 64},
                                   {129, 1},
                                   {130, 15},
                                   {300, 16},
                                   {300, 64},
                                   {330, 65},
                                   {257, 500},
                                   {1500, 600}}) {
    Problem problem({3, len, 1}, 2, len % 2 == 0 ? 33 : 16, false, rng);
    problem.reach = reach;
    check_problem(problem, "len=" + std::to_string(len) + " reach=" + std::to_string(reach));
  }
}

// Of a sequence all keys, some and one; with a reach as few as leave a key to every query.
ENCAST_TEST(attention_sees_its_keys) {
  Rng rng(15);
  for (const auto& [len, seen, reach] : {std::array{32, 32, 0},
                                         {32, 31, 0},
                                         {32, 9, 0},
                                         {32, 1, 0},
                                         {200, 150, 0},
                                         {1100, 40, 0},
                                         {1100, 1030, 0},
                                         {32, 9, 64},
                                         {100, 90, 10},
                                         {300, 236, 64},
                                         {129, 128, 1}}) {
    const std::string what =
        "len=" + std::to_string(len) + " seen=" + std::to_string(seen) + " reach=" + std::to_string(reach);
    for (const bool biased : {false, true}) {
      if (biased && reach > 0) continue;
      Problem problem({3, len, 1}, 2, len % 2 == 0 ? 33 : 16, biased, rng);
      problem.reach = reach;
      problem.seen = {reach > 0 ? 2 : 1, seen, 1};
      check_problem(problem, what + (biased ? " biased" : ""));
    }
  }
}

ENCAST_TEST(rows_behind_the_seen_keys_change_no_other) {
  Rng rng(16);
  Problem problem({20, 40}, 2, 32, false, rng);
  problem.seen = {20, 12};
  for (const Kernel& kernel : kernels()) {
    GuardedMatrix<float> before(60, 64), after(60, 64);
    problem.run(kernel, before);
    GuardedMatrix<float> kept(problem.qkv.rows, problem.qkv.cols);
    for (int64_t t = 0; t < 60; ++t) std::copy_n(problem.qkv.row(t), problem.qkv.cols, kept.row(t));
    for (int64_t j = 0; j < problem.qkv.cols; ++j) problem.qkv.at(33, j) = 1e3f;
    problem.run(kernel, after);
    for (int64_t t = 0; t < 60; ++t) {
      if (t == 33) {
        CHECK(!std::equal(before.row(t), before.row(t) + 64, after.row(t)), kernel.name);
      } else {
        CHECK_SAME_BITS(before.row(t), after.row(t), size_t{64}, kernel.name, " token ", t);
      }
    }
    for (int64_t t = 0; t < 60; ++t) std::copy_n(kept.row(t), problem.qkv.cols, problem.qkv.row(t));
  }
}

ENCAST_TEST(local_attention_is_another_one_and_only_where_it_must) {
  Rng rng(13);
  Problem near({200}, 1, 32, false, rng), all({200}, 1, 32, false, rng);
  std::copy_n(near.qkv.data(), near.qkv.buffer.size(), all.qkv.data());
  near.reach = 20;
  for (const Kernel& kernel : kernels()) {
    GuardedMatrix<float> local(200, 32), whole(200, 32), again(200, 32);
    near.run(kernel, local);
    all.run(kernel, whole);
    for (int64_t t = 0; t < 200; ++t) {
      CHECK(!std::equal(local.row(t), local.row(t) + 32, whole.row(t)), kernel.name, " token ", t);
    }
    // A key that no query of the first block reaches.
    std::copy_n(near.qkv.data(), near.qkv.buffer.size(), all.qkv.data());
    for (int64_t j = 0; j < 96; ++j) all.qkv.at(150, j) = 1e3f;
    all.reach = 20;
    all.run(kernel, again);
    CHECK_SAME_BITS(local.data(), again.data(), size_t{128 * 32}, kernel.name);
    CHECK(!std::equal(local.row(131), local.row(132), again.row(131)), kernel.name);
    std::copy_n(near.qkv.data(), near.qkv.buffer.size(), all.qkv.data());
    all.reach = 0;
  }
}

// Pieces that begin and end within blocks of queries, among neighbours and scratch that hold no numbers.
ENCAST_TEST(bits_of_a_local_attention_depend_on_the_sequence_alone) {
  Rng rng(14);
  Problem together({20, 300, 9}, 2, 40, false, rng);
  together.reach = 30;
  for (const Kernel& kernel : kernels()) {
    GuardedMatrix<float> out(together.qkv.rows, together.hidden);
    together.run(kernel, out);
    Problem poisoned({20, 300, 9}, 2, 40, false, rng);
    poisoned.reach = 30;
    for (int64_t t = 0; t < poisoned.qkv.rows; ++t) {
      for (int64_t j = 0; j < poisoned.qkv.cols; ++j) {
        const bool mine = t >= 20 && t < 320;
        poisoned.qkv.at(t, j) = mine ? together.qkv.at(t, j) : std::numeric_limits<float>::quiet_NaN();
      }
    }
    std::fill(poisoned.scratch.begin(), poisoned.scratch.end(), std::numeric_limits<float>::quiet_NaN());
    GuardedMatrix<float> alone(poisoned.qkv.rows, poisoned.hidden);
    for (int64_t h = 0; h < 2; ++h) {
      for (const auto& [begin, end] : {std::pair{0, 5}, {5, 127}, {127, 129}, {129, 129}, {129, 300}}) {
        kernel.fn(poisoned.args(alone), 1, h, begin, end, poisoned.scratch.data());
      }
    }
    CHECK_SAME_BITS(out.row(20), alone.row(20), static_cast<size_t>(300 * alone.cols), kernel.name);
    CHECK(alone.untouched(0, 0, 20 * alone.cols) && alone.untouched(320, 0, 9 * alone.cols), kernel.name);
  }
}

// Every length, with each table alone and both; heads of every kind; more than 1024 keys, where a block has
// fewer queries.
ENCAST_TEST(scores_that_know_of_distances) {
  Rng rng(15);
  const int32_t dims[] = {32, 64, 8, 33, 16, 1, 80};
  const auto check = [&](int32_t len, int32_t head_dim, int tables, float peak = 1.0f) {
    Problem problem({3, len, 1}, 2, head_dim, false, rng, peak, tables);
    check_problem(problem, "len=" + std::to_string(len) + " head_dim=" + std::to_string(head_dim) +
                               " tables=" + std::to_string(tables));
  };
  for (int32_t len = 1; len <= 70; ++len) check(len, dims[len % 7], 1 + len % 3);
  for (const int32_t head_dim : {1, 8, 16, 31, 33, 64, 128, 200}) check(65, head_dim, 3);
  for (const int32_t len : {128, 129, 500}) check(len, 64, 3);
  check(1100, 8, 3);
  for (const float peak : {1e-3f, 30.0f}) check(50, 32, 3, peak);
}

// One table for all heads, as large as one head's and no larger (guard pages), and the bits that a copy of it
// for each head gives.
ENCAST_TEST(tables_for_all_heads) {
  Rng rng(18);
  const int32_t dims[] = {64, 33, 1, 16};
  for (int32_t len = 1; len <= 40; ++len) {
    const int32_t head_dim = dims[len % 4];
    const int tables = 1 + len % 3;
    Problem one({3, len, 1}, 3, head_dim, false, rng, 1.0f, tables, true);
    check_problem(one, "len=" + std::to_string(len) + " head_dim=" + std::to_string(head_dim) +
                           " shared tables=" + std::to_string(tables));
    Problem each({3, len, 1}, 3, head_dim, false, rng, 1.0f, tables);
    std::copy_n(one.qkv.data(), one.qkv.buffer.size(), each.qkv.data());
    for (int64_t head = 0; head < 3; ++head) {
      for (const auto& [from, to] :
           {std::pair{&one.key_table, &each.key_table}, {&one.query_table, &each.query_table}}) {
        std::copy_n(from->data(), from->rows * 16, to->data() + head * from->rows * 16);
      }
    }
    for (const Kernel& kernel : kernels()) {
      if (kernel.arithmetic != "f32") continue;
      GuardedMatrix<float> a(one.qkv.rows, one.hidden), b(one.qkv.rows, one.hidden);
      one.run(kernel, a);
      each.run(kernel, b);
      CHECK_SAME_BITS(a.data(), b.data(), a.buffer.size(), kernel.name);
    }
  }
}

// Pieces of any size, among neighbours and scratch that hold no numbers.
ENCAST_TEST(bits_with_distances_depend_on_the_sequence_alone) {
  Rng rng(16);
  Problem together({20, 300, 9}, 2, 40, false, rng, 1.0f, 3),
      poisoned({20, 300, 9}, 2, 40, false, rng, 1.0f, 3);
  std::copy_n(together.key_table.data(), together.key_table.buffer.size(), poisoned.key_table.data());
  std::copy_n(together.query_table.data(), together.query_table.buffer.size(), poisoned.query_table.data());
  for (int64_t t = 0; t < poisoned.qkv.rows; ++t) {
    for (int64_t j = 0; j < poisoned.qkv.cols; ++j) {
      const bool mine = t >= 20 && t < 320;
      poisoned.qkv.at(t, j) = mine ? together.qkv.at(t, j) : std::numeric_limits<float>::quiet_NaN();
    }
  }
  for (const Kernel& kernel : kernels()) {
    if (kernel.arithmetic != "f32") continue;
    GuardedMatrix<float> out(together.qkv.rows, together.hidden), alone(poisoned.qkv.rows, poisoned.hidden);
    together.run(kernel, out);
    std::fill(poisoned.scratch.begin(), poisoned.scratch.end(), std::numeric_limits<float>::quiet_NaN());
    for (int64_t h = 0; h < 2; ++h) {
      for (const auto& [begin, end] :
           {std::pair{0, 5}, {5, 6}, {6, 127}, {127, 129}, {129, 129}, {129, 300}}) {
        kernel.fn(poisoned.args(alone), 1, h, begin, end, poisoned.scratch.data());
      }
    }
    CHECK_SAME_BITS(out.row(20), alone.row(20), static_cast<size_t>(300 * alone.cols), kernel.name);
    CHECK(alone.untouched(0, 0, 20 * alone.cols) && alone.untouched(320, 0, 9 * alone.cols), kernel.name);
  }
}

// Tables for longer texts are read around their middle.
ENCAST_TEST(tables_are_relative_to_their_middle) {
  Rng rng(17);
  Problem shorter({12}, 2, 16, false, rng, 1.0f, 3), longer({12, 90}, 2, 16, false, rng, 1.0f, 3);
  for (int64_t t = 0; t < 12; ++t) std::copy_n(shorter.qkv.row(t), shorter.qkv.cols, longer.qkv.row(t));
  const auto moved = [&](const GuardedMatrix<float>& from, GuardedMatrix<float>& to) {
    const int64_t narrow = relative_columns(12), wide = relative_columns(90);
    const auto at = [](int64_t columns, int64_t head, int64_t distance, int64_t d) {
      const int64_t column = relative_origin(columns) + distance;
      return std::pair{(head * columns / 16 + column / 16) * 16 + d, column % 16};
    };
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t distance = -11; distance <= 11; ++distance) {
        for (int64_t d = 0; d < 16; ++d) {
          const auto [row, col] = at(narrow, head, distance, d);
          const auto [to_row, to_col] = at(wide, head, distance, d);
          to.at(to_row, to_col) = from.at(row, col);
        }
      }
    }
  };
  moved(shorter.key_table, longer.key_table);
  moved(shorter.query_table, longer.query_table);
  for (const Kernel& kernel : kernels()) {
    if (kernel.arithmetic != "f32") continue;
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
      const int64_t more = attention_scratch_bytes(len, head_dim, true);
      CHECK(bytes >= last && bytes % 64 == 0, "len=", len);
      CHECK(more >= bytes && more % 64 == 0, "len=", len);
      CHECK(more >= 4 * (scratch_parts(len, head_dim).floats() + distance_parts(len, head_dim).floats()),
            "len=", len);
      last = bytes;
    }
  }
}

ENCAST_TEST_MAIN
