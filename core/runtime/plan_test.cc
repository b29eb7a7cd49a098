#include "runtime/plan.h"

#include <clocale>
#include <string>

#include "base/error.h"
#include "runtime/step_keys.h"
#include "runtime/test_plan.h"
#include "testing/check.h"

namespace encast {
namespace {

const std::string kGood = testing::kTestPlan;

// A good plan with one text replaced by another.
std::string with(const std::string& from, const std::string& to, std::string text = kGood) {
  const size_t at = text.find(from);
  if (at == std::string::npos) testing::fail(__FILE__, __LINE__, "the test plan does not hold: " + from);
  return text.replace(at, from.size(), to);
}

void refused(const std::string& from, const std::string& to, const std::string& reason,
             const std::string& good = kGood) {
  try {
    Plan::parse(with(from, to, good));
  } catch (const PlanError& error) {
    if (std::string(error.what()).find(reason) == std::string::npos) {
      testing::fail(__FILE__, __LINE__, "refused for another reason: " + std::string(error.what()));
    }
    return;
  }
  testing::fail(__FILE__, __LINE__, "accepted: " + to);
}

ENCAST_TEST(the_good_plan_is_read_whole) {
  const Plan plan = Plan::parse(testing::kTestPlan);
  CHECK_EQ(plan.weights.size(), size_t{11});
  CHECK_EQ(plan.values.size(), size_t{10});
  CHECK_EQ(plan.steps.size(), size_t{10});
  CHECK_EQ(plan.outputs.size(), size_t{3});
  const size_t begins[] = {0, 2, 3, 5, 8};
  CHECK_EQ(plan.stages.size(), std::size(begins));
  for (size_t number = 0; number < plan.stages.size(); ++number) {
    CHECK_EQ(plan.stages[number].begin, begins[number]);
    CHECK_EQ(plan.stages[number].end, number == 4 ? plan.steps.size() : begins[number + 1]);
    CHECK(plan.stages[number].kind == (number == 1 ? StageKind::sequences : StageKind::rows));
  }
  CHECK_EQ(plan.steps[0].skip, 1);
  CHECK_EQ(plan.steps[0].eps, 1e-12f);
  CHECK(plan.steps[3].act == Activation::gelu);
  CHECK(plan.steps[6].mode == Pooling::max);
  plan.check_weights(testing::kTestWeightBytes);
  CHECK_THROWS(plan.check_weights(testing::kTestWeightBytes - 1), PlanError, "inside of the weights file");
}

// The good plan whose narrow copy has one scale and one zero point.
ENCAST_TEST(fixed_ranges) {
  const std::string good = with("out=v0 also=v1", "q8_scale=0.0078125 q8_zero=97 out=v0 also=v1");
  const Plan plan = Plan::parse(good);
  CHECK_EQ(plan.steps[0].q8_scale, 0.0078125f);
  CHECK_EQ(plan.steps[0].q8_zero, 97);
  refused("q8_scale=0.0078125", "q8_scale=-1", "no normal number above 0", good);
  refused("q8_scale=0.0078125", "q8_scale=1e-40", "no normal number above 0", good);
  refused("q8_scale=0.0078125", "q8_scale=inf", "no finite number", good);
  refused("q8_zero=97", "q8_zero=256", "q8_zero", good);
  refused("q8_zero=97", "q8_zero=-1", "q8_zero", good);
  refused("q8_scale=0.0078125 ", "", "q8_zero without a q8_scale", good);
  refused("q8_scale", "zero_point=1 q8_scale", "zero points of its rows and a q8_scale", good);
  refused("value v1 q8", "value v1 bf16", "that is not q8", with("block=1152", "block=2048", good));
}

// The good plan with a sparse product of 48 outputs and five groups.
std::string sparse_plan() {
  std::string text = with("w5 s8 panels 48 16", "w5 s8 dense 5 16");
  text = with("value v0", "weight w11 u16 dense 5 4 @6400\nweight w12 i32 dense 1 17 @6464\nvalue v0", text);
  return with("step linear name=qkv x=v1 w=w5", "step sparse name=qkv x=v1 w=w5 columns=w11 starts=w12",
              text);
}

ENCAST_TEST(sparse_products) {
  const std::string good = sparse_plan();
  CHECK_EQ(Plan::parse(good).steps.size(), size_t{10});
  refused("columns=w11 ", "", "lacks columns=", good);
  refused("s8 dense 5 16", "s8 dense 5 15", "do not fit each other", good);
  refused("s8 dense 5 16", "s8 dense 6 16", "do not fit each other", good);
  refused("u16 dense 5 4", "u16 dense 5 3", "do not fit each other", good);
  refused("w11 u16", "w11 i32", "wrong dtype or layout", good);
  refused("w5 s8", "w5 u16", "wrong dtype or layout", good);
  refused("i32 dense 1 17", "i32 dense 1 16", "wrong size", good);
  refused("i32 dense 1 17", "i32 dense 1 18", "wrong size", good);
  refused("i32 dense 1 17", "i32 dense 17 1", "wrong size", good);
  refused("starts=w12", "starts=w7", "wrong dtype or layout", good);
  refused("colsum=w7", "colsum=w6", "wrong dtype or layout", good);
  refused("bias=w8 act=none arithmetic=s8", "bias=w10 act=none arithmetic=s8", "wrong size", good);
  refused("i32 padded 1 48", "i32 padded 1 47", "wrong size", good);
  refused("x=v1 w=w5", "x=v0 w=w5", "wrong dtype", good);
  refused("arithmetic=s8 out=v2", "arithmetic=s8 out=v3", "wrong shape", good);
  refused("stage sequences", "stage rows", "attention mixes rows", good);
  const std::string apart =
      with("step sparse", "stage heads\nstep sparse", with("head_tokens=0", "head_tokens=48", good));
  refused("stage sequences\n", "", "its heads do not fill panels", apart);
}

ENCAST_TEST(sparse_products_with_panels_for_few_rows) {
  const std::string good =
      with("arithmetic=s8 out=v2", "arithmetic=s8 dense=w13 dense_rows=8 out=v2",
           with("value v0", "weight w13 s8 panels 48 16 @8192\nvalue v0", sparse_plan()));
  CHECK_EQ(Plan::parse(good).steps[1].dense, 13);
  CHECK_EQ(Plan::parse(good).steps[1].dense_rows, 8);
  refused("dense=w13 ", "", "needs dense and dense_rows, or neither", good);
  refused("dense_rows=8 ", "", "needs dense and dense_rows, or neither", good);
  refused("dense_rows=8", "dense_rows=0", "dense_rows", good);
  refused("dense_rows=8", "dense_rows=64", "dense_rows", good);
  refused("s8 panels 48 16 @8192", "s8 panels 47 16 @8192", "panels of another shape", good);
  refused("s8 panels 48 16 @8192", "s8 panels 48 15 @8192", "panels of another shape", good);
  refused("s8 panels 48 16 @8192", "s8 dense 48 16 @8192", "wrong dtype or layout", good);
  refused("s8 panels 48 16 @8192", "f32 panels 48 16 @8192", "wrong dtype or layout", good);
}

ENCAST_TEST(products_that_add) {
  const std::string good = with("name=dense x=v3", "name=dense x=v3 other=v0");
  CHECK_EQ(Plan::parse(good).steps[3].other, 0);
  refused("x=v3 other=v0", "x=v3 other=v2", "adds a value of another shape", good);
  refused("x=v3 other=v0", "x=v3 other=v1", "wrong dtype", good);
  refused("x=v3 other=v0", "x=v3 other=v5", "no step before it makes", good);
  refused("x=v3 other=v0", "x=v3 other=v4", "no step before it makes", good);  // its own output
  refused("arithmetic=f32 out=v4", "arithmetic=f32 column=64 out=v4", "adds a value of another shape", good);
  const std::string sparse = with(
      "stage sequences",
      "step sparse name=again x=v1 other=v2 w=w5 columns=w11 starts=w12 scale=w6 colsum=w7 bias=w8 act=none "
      "arithmetic=s8 out=v10\nstage sequences",
      with("@-\nstage", "@-\nvalue v10 f32 tokens 48 @65536\nstage", sparse_plan()));
  CHECK_EQ(Plan::parse(sparse).steps[2].other, 2);
  refused("x=v1 other=v2", "x=v1 other=v0", "adds a value of another shape", sparse);
  refused("x=v1 other=v2", "x=v1 other=v10", "no step before it makes", sparse);
}

// The good plan with the columns of queries and keys turned.
std::string rotary_plan() {
  std::string text = with("value v0", "weight w11 f32 dense 40 8 @12288\nvalue v0");
  return with("stage sequences", "step rotary name=turned x=v2 table=w11 heads=2 out=v2\nstage sequences",
              text);
}

ENCAST_TEST(rotary_positions) {
  const std::string good = rotary_plan();
  CHECK_EQ(Plan::parse(good).steps[2].table, 11);
  refused("table=w11 heads=2", "table=w11 heads=5", "columns that are not 3 x heads", good);
  refused("table=w11 heads=2", "table=w11 heads=16", "heads of an odd number of columns", good);
  refused("dense 40 8", "dense 39 8", "a table that is not max_len positions", good);
  refused("dense 40 8", "dense 40 16", "a table that is not max_len positions", good);
  refused("dense 40 8", "panels 40 8", "wrong dtype or layout", good);
  refused("table=w11 ", "", "lacks table=", good);
  refused("heads=2 out=v2", "heads=2 out=v3", "does not turn its rows in place", good);
}

// The good plan with vectors of distances: seven blocks of sixteen for two heads of eight columns.
std::string distances_plan() {
  const std::string text = with("value v0", "weight w11 f32 dense 112 16 @12288\nvalue v0");
  return with("heads=2 factor", "key_table=w11 query_table=w11 heads=2 factor", text);
}

ENCAST_TEST(tables_of_distances) {
  const std::string good = distances_plan();
  CHECK_EQ(Plan::parse(good).steps[2].key_table, 11);
  CHECK_EQ(Plan::parse(with("key_table=w11 ", "", good)).steps[2].query_table, 11);
  refused("dense 112 16", "dense 80 16", "does not hold the distances", good);
  refused("dense 112 16", "dense 128 16", "does not hold the distances", good);
  refused("dense 112 16", "dense 111 16", "not heads x blocks", good);
  refused("dense 112 16", "dense 112 15", "not heads x blocks", good);
  refused("dense 112 16", "panels 112 16", "wrong dtype or layout", good);
  refused("factor=0.35 arithmetic=f32", "factor=0.35 arithmetic=s8", "arithmetic that is not f32", good);
  refused("factor=0.35 ", "factor=0.35 reach=3 ", "beside a reach", good);
  refused("query_table=w11", "query_table=w12", "two tables of unlike sizes",
          with("value v0", "weight w12 f32 dense 144 16 @19456\nvalue v0", good));
}

// Seven blocks of sixteen for all heads: half as many rows.
ENCAST_TEST(tables_of_distances_for_all_heads) {
  const std::string good = with("dense 112 16", "dense 56 16",
                                with("query_table=w11", "query_table=w11 shared_tables=1", distances_plan()));
  CHECK(Plan::parse(good).steps[2].shared_tables);
  CHECK(!Plan::parse(distances_plan()).steps[2].shared_tables);
  refused("shared_tables=1 ", "", "not heads x blocks", good);
  refused("dense 56 16", "dense 40 16", "does not hold the distances", good);
  refused("dense 56 16", "dense 64 16", "does not hold the distances", good);
  refused("dense 56 16", "dense 55 16", "not heads x blocks", good);
  refused("heads=2 factor", "shared_tables=1 heads=2 factor", "shares tables that it does not have");
}

// A norm without beta is one by the root mean square; one of the embeddings has both or none.
ENCAST_TEST(norms_without_beta) {
  const std::string good = with("gamma=w3 beta=w4 eps=1e-5", "gamma=w3 eps=1e-5");
  for (const StepDecl& step : Plan::parse(good).steps) CHECK(step.kind != StepKind::norm || step.beta < 0);
  refused("name=norm x=v4 other=v0 gamma=w3 ", "name=norm x=v4 other=v0 ", "lacks gamma=", good);
  refused("name=norm x=v4 other=v0 gamma=w3", "name=norm x=v4 other=v0 gamma=w0", "vector of the wrong size",
          good);
}

// The good plan with windows of three tokens around the embeddings, beside the norm.
ENCAST_TEST(windows_of_tokens) {
  std::string good = with("@-\nstage", "@-\nvalue v10 f32 tokens 48 @65536\nstage");
  good = with("out=v5\nstage", "out=v5\nstep window name=window x=v0 out=v10\nstage", good);
  CHECK_EQ(Plan::parse(good).steps[5].x, 0);
  refused("window x=v0", "window x=v5", "a window reads rows that it makes", good);
  refused("window x=v0", "window x=v4", "a window reads rows that it makes", good);
  refused("window x=v0", "window x=v1", "wrong dtype", good);
  refused("v10 f32 tokens 48", "v10 f32 tokens 32", "no odd number of rows", good);
  refused("v10 f32 tokens 48", "v10 f32 tokens 47", "no odd number of rows", good);
  refused("v10 f32 tokens 48", "v10 f32 seqs 48", "wrong shape", good);
}

// The good plan whose last output has the columns of v8 twice.
std::string concat_plan() {
  std::string text = with("step elementwise name=act x=v8 factor=1 act=relu out=v9",
                          "step elementwise name=act x=v8 factor=1 act=relu out=v9\n"
                          "step elementwise name=act x=v8 factor=1 act=none column=16 out=v9");
  return with("v9 f32 selected 16", "v9 f32 selected 32", text);
}

ENCAST_TEST(values_side_by_side) {
  const std::string good = concat_plan();
  CHECK_EQ(Plan::parse(good).steps.back().column, 16);
  refused("column=16", "column=15", "columns other than the next", good);
  refused("column=16", "column=17", "columns other than the next", good);
  refused("act=none column=16", "act=none", "columns other than the next", good);
  refused("v9 f32 selected 32", "v9 f32 selected 31", "columns other than the next", good);
  refused("v9 f32 selected 32", "v9 f32 seqs 32", "wrong shape", good);
  refused("v9 f32 selected 32", "v9 f32 selected 33", "output logits is never made", good);
}

ENCAST_TEST(gated_activations) {
  const std::string good =
      with("step elementwise name=act x=v8 factor=1 act=relu", "step gated name=act x=v8 act=relu",
           with("v9 f32 selected 16", "v9 f32 selected 8"));
  CHECK(Plan::parse(good).steps.back().act == Activation::relu);
  refused("v9 f32 selected 8", "v9 f32 selected 16", "wrong shape", good);
  refused("v9 f32 selected 8", "v9 f32 seqs 8", "wrong shape", good);
  refused("x=v8 act=relu", "x=v1 act=relu", "wrong dtype", good);
  // A product of 15 outputs, whose columns have no halves.
  std::string odd = with("v4 f32 tokens 16 @+0", "v4 f32 tokens 15 @+0", good);
  odd = with("w9 f32 panels 16 16", "w9 f32 panels 15 16",
             with("w10 f32 padded 1 16", "w10 f32 padded 1 15", odd));
  odd = with("step norm name=norm x=v4 other=v0 gamma=w3 beta=w4 eps=1e-5 out=v5",
             "step gated name=norm x=v4 act=gelu out=v5", odd);
  CHECK_THROWS(Plan::parse(odd), PlanError, "columns have no halves");
}

ENCAST_TEST(local_attention) {
  const std::string good = with("factor=0.35 ", "factor=0.35 reach=4 ");
  CHECK_EQ(Plan::parse(good).steps[2].reach, 4);
  CHECK_EQ(Plan::parse(kGood).steps[2].reach, 0);
  refused("reach=4", "reach=0", "reach is '0'", good);
  refused("reach=4", "reach=-1", "reach is '-1'", good);
  refused("reach=4", "reach=2147483648", "reach is", good);
  const std::string biased = with("value v0", "weight w11 f32 dense 2 79 @12288\nvalue v0");
  const std::string both = with("x=v2 heads=2 ", "x=v2 bias=w11 heads=2 ", biased);
  CHECK_EQ(Plan::parse(both).steps[2].bias, 11);
  refused("factor=0.35 ", "factor=0.35 reach=4 ", "both a reach and a bias", both);
}

ENCAST_TEST(hidden_keys) {
  const std::string good = with("factor=0.35 ", "factor=0.35 reach=4 unseen=7 most_unseen=4 ");
  CHECK_EQ(Plan::parse(good).steps[2].unseen, 7);
  CHECK_EQ(Plan::parse(good).steps[2].most_unseen, 4);
  CHECK_EQ(Plan::parse(kGood).steps[2].unseen, -1);
  refused("unseen=7", "unseen=-1", "unseen is '-1'", good);
  refused("most_unseen=4", "most_unseen=0", "most_unseen is '0'", good);
  refused("most_unseen=4", "most_unseen=5", "more keys than it reaches", good);
  refused("unseen=7 ", "", "unseen or most_unseen alone", good);
  refused("most_unseen=4 ", "", "unseen or most_unseen alone", good);
}

ENCAST_TEST(grammar) {
  refused("encast-plan 1", "encast-plan 2", "no plan of version 1");
  refused("limits", "limit", "begins with");
  refused("vocab=50", "vocab=0", "vocab is '0'");
  refused("vocab=50", "vocab=5x", "vocab is");
  refused("vocab=50 ", "", "where vocab= should stand");
  refused("chunk_tokens=48", "chunk_tokens=39", "chunk_tokens");
  refused("weight w1 ", "weight w2 ", "count up");
  refused("f32 dense 50", "f64 dense 50", "dtype is 'f64'; accepted: f32");
  refused("w0 f32 dense", "w0 q8 dense", "cannot be q8");
  refused("@3200", "3200", "@offset");
  refused("@3200", "@-64", "offset is");
  refused("value v1 q8", "value v1 s8", "f32, bf16 or q8");
  refused("value v1 q8 tokens 16 @+0", "value v1 q8 tokens 16 @-", "caller's memory is f32");
  refused("step norm", "step nrom", "no kind of step");
  refused("x=v4 other=v0", "x=v4 x=v0", "x twice");
  refused("x=v4 other=v0 ", "other=v0 ", "lacks x=");
  refused("eps=1e-5", "eps=nan", "finite");
  refused("eps=1e-5", "eps=1e-5z", "finite");
  refused("eps=1e-5", "epsilon=1e-5", "no key of norm");
  refused("x=v5 out=v8", "x=v99 out=v8", "operand is '99'");
  refused(" arithmetic=f32 out=v3", " out=v3", "lacks arithmetic=");
  refused("mode=max", "mode=min", "mode is 'min'");
  refused("output embedding v7", "output last_hidden_state v7", "declared twice");
  refused("output logits v9\n", "output logits v9", "newline");
  refused("out=v0 also=v1\n", "out=v0 also=v1 \n", "");
  refused("step embed", "step  embed", "empty word");
  CHECK_THROWS(Plan::parse(""), PlanError, "no limits");
  CHECK_THROWS(Plan::parse("\n"), PlanError, "ends where");
  CHECK_THROWS((Plan::parse(std::string("encast-plan 1\n\0\n", 16))), PlanError, "begins with");
}

ENCAST_TEST(every_key_of_a_kind_of_step_is_known) {
  for (const char* kind : {
#define ENCAST_STEP(kind) #kind,
#include "runtime/steps/steps.inc"
#undef ENCAST_STEP
       }) {
    std::string known;
    for_each_key(*step_kind(kind), [&](const StepKey& key, bool optional) {
      known += (known.empty() ? "" : " ") + std::string(key.name) + (optional ? "?" : "");
    });
    CHECK_EQ(known, std::string(step_keys(*step_kind(kind))));
  }
  CHECK(!step_kind("nothing"));
}

ENCAST_TEST(meaning) {
  refused("word=w0", "word=w5", "wrong dtype or layout");
  refused("vocab=50", "vocab=51", "fewer word rows");
  refused("max_len=40", "max_len=41", "too few positions");
  refused("types=2", "types=3", "fewer token types");
  refused("out=v0 also=v1", "out=v0 also=v2", "wrong shape");
  refused("x=v1 w=w5", "x=v3 w=w5", "no step before");
  refused("x=v1 w=w5 scale=w6 colsum=w7", "x=v1 w=w5", "needs scale and colsum");
  refused("x=v1 w=w5", "x=v0 w=w5", "wrong dtype");
  refused("scale=w6 colsum=w7", "scale=w10 colsum=w7", "wrong size");
  refused("heads=2", "heads=3", "3 x heads");
  refused("factor=0.35", "factor=0", "not positive");
  refused("x=v4 other=v0 gamma", "x=v4 other=v2 gamma", "unlike shapes");
  refused("gamma=w3 beta=w4 eps=1e-5", "gamma=w3 beta=w4 eps=-1", "negative eps");
  refused("act=gelu arithmetic=f32", "act=gelu arithmetic=f32 column=16", "begin a panel");
  refused("act=gelu arithmetic=f32", "act=gelu arithmetic=f32 column=64", "other than the next");
  refused("column=16", "column=24", "other than the next");
  refused("column=16", "column=32", "other than the next");
  refused("column=16", "column=0", "other than the next");
  refused("step pool name=pool x=v5 mode=max column=16 out=v6\n", "", "no step before");
  refused("value v6 f32 seqs 32", "value v6 f32 seqs 24", "other than the next");
  refused("value v6 f32 seqs 32", "value v6 f32 selected 32", "wrong shape");
  refused("step linear name=qkv", "step embed word=w0 eps=1 offset=0 skip=-1 out=v3\nstep linear name=qkv",
          "a second embed");
  refused("out=v3\n", "out=v2\n", "second time");
  refused("output embedding v7", "output embedding v1", "not f32");
  refused("x=v6 out=v7", "x=v7 out=v6", "no step before");
  refused("value v8 f32 selected 16 @49152", "value v8 f32 selected 16 @-", "caller's memory");
  refused("value v9 f32 selected 16 @-", "value v9 f32 selected 16 @262144", "arena");
  refused("@8192", "@8200", "64-byte aligned");
  // v0 is read by the norm, so v3 may not lie on it; a q8 value's scales count as its memory.
  refused("value v3 f32 tokens 16 @20480", "value v3 f32 tokens 16 @0", "v3 lies over v0");
  refused("value v3 f32 tokens 16 @20480", "value v3 f32 tokens 16 @8192", "v3 lies over v2");
  // Within a stage one thread may read other rows of v3 while another already writes v5.
  refused("value v5 f32 tokens 16 @28672", "value v5 f32 tokens 16 @20544", "v5 lies over v3");
  refused("value v5 f32 tokens 16 @28672", "value v5 f32 tokens 16 @17472", "v5 lies over v3");
}

// Where v3 lies, whose rows are read for the last time before the same rows of v5 are made.
ENCAST_TEST(values_made_in_place) {
  const std::string good = with("value v5 f32 tokens 16 @28672", "value v5 f32 tokens 16 @20480");
  CHECK_EQ(Plan::parse(good).values[5].offset, Plan::parse(good).values[3].offset);
  refused("name=norm x=v4 other=v0", "name=norm x=v4 other=v3", "v5 lies over v3", good);
  refused("name=rows x=v5", "name=rows x=v3", "v5 lies over v3", good);
  // The norm reads v0 while it makes v5.
  refused("value v5 f32 tokens 16 @28672", "value v5 f32 tokens 16 @0", "v5 lies over v0");
  // Rows of another kind are not the same rows.
  refused("value v8 f32 selected 16 @49152", "value v8 f32 selected 16 @20480", "v8 lies over v5", good);
  // A window reads rows of other tokens, which another thread may already make.
  const std::string window =
      with("step norm name=norm", "step window name=window x=v3 out=v10\nstep norm name=norm",
           with("@-\nstage", "@-\nvalue v10 f32 tokens 48 @65536\nstage"));
  Plan::parse(window);
  refused("value v5 f32 tokens 16 @28672", "value v5 f32 tokens 16 @20480", "v5 lies over v3", window);
}

ENCAST_TEST(memory_of_a_block) {
  refused("block=1152", "block=1088", "inside of the block of 1088");
  refused("block=1152", "block=1184", "no multiple of 64");
  refused("block=1152", "block=68719476736", "block is");
  refused("@+0\nvalue v5", "@+32\nvalue v5", "64-byte aligned");
  refused("@+0\nvalue v5", "@\nvalue v5", "offset is");
  refused("@+0\nvalue v5", "@+-\nvalue v5", "offset is");
  refused("block_rows=16", "block_rows=24", "no multiple of 16");
  refused("stream_rows=8", "stream_rows=0", "stream_rows is");
  refused("value v3 f32 tokens 16 @20480", "value v3 f32 tokens 16 @+0", "v3 lies in the memory of a block");
  refused("value v0 f32 tokens 16 @0", "value v0 f32 tokens 16 @+0", "v0 lies in the memory of a block");
  refused("value v9 f32 selected 16 @-", "value v9 f32 selected 16 @+0", "output logits lies");
  // The stage of an attention takes no blocks, whether its product is in it or not.
  const std::string heads = with("block=0", "block=65536", testing::HeadModel{.int8 = true}.plan(32));
  refused("value v1 q8 tokens 128 @312064", "value v1 q8 tokens 128 @+0",
          "v1 lies in the memory of a block, but the stage of an attention has no blocks", heads);
  refused("value v2 f32 tokens 384 @619264", "value v2 f32 tokens 384 @+0",
          "v2 lies in the memory of a block, but", heads);
  refused("value v2 f32 tokens 48 @8192\n", "value v2 f32 tokens 48 @+0\n",
          "v2 lies in the memory of a block, but", with("block=1152", "block=3072"));
  // v8 and v9 are made by one stage, in which both are alive.
  const std::string both = with("value v8 f32 selected 16 @49152", "value v8 f32 selected 16 @+0");
  Plan::parse(both);
}

ENCAST_TEST(stages) {
  refused("stage rows\nstep embed", "step embed", "before the first stage");
  refused("stage rows\nstep embed", "stage row\nstep embed", "kind of stage is 'row'; accepted: rows, seq");
  refused("stage rows\nstep embed", "stage rows\nstage rows\nstep embed", "has no steps");
  refused("output last_hidden_state", "stage rows\noutput last_hidden_state", "the last stage of the plan");
  refused("stage rows\nstep embed", "stage sequences\nstep embed", "stage 0 (sequences): holds other");
  refused("stage sequences\n", "", "stage 0 (rows): attention mixes rows");
  refused("stage rows\nstep linear name=dense", "step linear name=dense",
          "holds other steps than one attention");
  refused("stage rows\nstep pool", "step pool", "rows of unlike kinds");
  // What one stage could hold may be cut into more, as long as no value lies in a block that ended.
  refused("step norm", "stage rows\nstep norm", "v4 lies in the memory of a block, which ended");
  Plan::parse(with("step normalize", "stage rows\nstep normalize"));
}

ENCAST_TEST(stages_of_heads) {
  const testing::HeadModel model;
  const std::string good = model.plan(32);
  Plan::parse(good);
  refused("head_tokens=32", "head_tokens=0", "stage 1 (heads): head_tokens is 0", good);
  refused("head_tokens=32", "head_tokens=-1", "head_tokens is '-1'", good);
  refused("head_tokens=32 ", "", "where head_tokens= should stand", good);
  refused("stage rows\n", "stage heads\n", "other steps than a product and an attention", good);
  refused("step embed", "stage heads\nstep embed", "has no steps", good);
  refused("stage sequences\n", "stage heads\n", "other steps than a product",
          with("head_tokens=0", "head_tokens=8"));
  refused("output context v3", "output context v3\noutput qkv v2", "others than its attention read", good);
  const testing::HeadModel narrow{.heads = 3, .head_dim = 32};
  CHECK_THROWS(Plan::parse(narrow.plan(32)), PlanError, "its heads do not fill panels");
  std::string sum = with("arena=1540864", "arena=2462464", good);
  sum = with("@-\nstage", "@-\nvalue v4 f32 tokens 384 @1540864\nstage", sum);
  sum = with("stage heads\n", "step linear x=v0 w=w2 bias=w3 act=none arithmetic=f32 out=v4\nstage heads\n",
             sum);
  Plan::parse(sum);
  refused("name=qkv x=v0", "name=qkv x=v0 other=v4", "its product adds a value", sum);
  // A product in two parts, of which the stage has the second.
  std::string parts = with("w2 f32 panels 384 128", "w2 f32 panels 192 128", good);
  parts = with("w3 f32 padded 1 384", "w3 f32 padded 1 192", parts);
  parts = with("stage heads\n",
               "step linear x=v0 w=w2 bias=w3 act=none arithmetic=f32 column=0 out=v2\nstage heads\n", parts);
  parts = with("arithmetic=f32 out=v2", "arithmetic=f32 column=192 out=v2", parts);
  CHECK_THROWS(Plan::parse(parts), PlanError, "does not make all that its attention reads");
}

// Checks take time and memory with the square of some of these.
ENCAST_TEST(plans_of_absurd_size_are_refused) {
  std::string outputs;
  for (int index = 0; index < 100; ++index) outputs += "output o" + std::to_string(index) + " v5\n";
  refused("output embedding v7\n", outputs, "one output too many");
  std::string weights;
  for (int index = 11; index < 70000; ++index)
    weights += "weight w" + std::to_string(index) + " f32 dense 1 1 @0\n";
  refused("value v0 ", weights + "value v0 ", "too many lines");
  refused("chunk_tokens=48", "chunk_tokens=1048577", "chunk_tokens is");
}

// Any library of the process may have called setlocale.
ENCAST_TEST(numbers_are_read_alike_in_every_locale) {
  const char* found = nullptr;
  for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8", "fr_FR.utf8"}) {
    if (found == nullptr) found = std::setlocale(LC_NUMERIC, name);
  }
  if (found == nullptr) SKIP_TEST("no locale with a decimal comma is installed");
  const Plan plan = Plan::parse(testing::kTestPlan);
  std::setlocale(LC_NUMERIC, "C");
  CHECK_EQ(plan.steps[2].factor, 0.35f);
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
