#include <algorithm>

#include "runtime/attention_tasks.h"
#include "runtime/steps/step_type.h"

namespace encast {
namespace {

// Tables of distances: a vector for each distance, of each head or of all, as kernels/attention/attention.h
// lays them.
void check_tables(StepCheck& check, const StepDecl& step, int64_t hidden) {
  const int64_t width = step.shared_tables ? hidden / step.heads : hidden;
  check.need(step.reach == 0 && step.bias < 0, "has tables of distances beside a reach or a bias");
  check.need(step.arithmetic == "f32", "has tables of distances and an arithmetic that is not f32");
  int64_t columns = 0;
  for (const int id : {step.key_table, step.query_table}) {
    if (id < 0) continue;
    const WeightDecl& table = check.weight(id, DType::f32, WeightLayout::dense);
    check.need(table.cols == 16 && table.rows % width == 0,
               "has a table that is not heads x blocks of distances");
    const int64_t found = table.rows / width * 16;
    check.need(found % 32 == 16 && found >= relative_columns(check.plan().max_len),
               "has a table that does not hold the distances of max_len");
    check.need(columns == 0 || columns == found, "has two tables of unlike sizes");
    columns = found;
  }
}

void check_attention(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.need(x.rows == Rows::tokens && x.cols % (3 * int64_t{step.heads}) == 0,
             "has columns that are not 3 x heads");
  // 255 * 127 * columns must fit an int32 sum, and 127 * 127 * columns the integers of an f32.
  check.need(x.cols / 3 / step.heads <= 1024, "has heads wider than 1024");
  check.need(step.factor > 0, "has a factor that is not positive");
  check.need(step.reach == 0 || step.bias < 0, "has both a reach and a bias");
  check.need((step.unseen < 0) == (step.most_unseen == 0), "has unseen or most_unseen alone");
  check.need(step.reach == 0 || step.most_unseen <= step.reach, "hides more keys than it reaches");
  const auto first = std::ranges::find(check.plan().steps, StepKind::attention, &StepDecl::kind);
  check.need(first->unseen == step.unseen && first->most_unseen == step.most_unseen,
             "hides other keys than the first attention; they are counted once");
  if (step.bias >= 0) {
    const WeightDecl& bias = check.weight(step.bias, DType::f32, WeightLayout::dense);
    check.need(bias.rows == step.heads && bias.cols >= 2 * check.plan().max_len - 1 && bias.cols % 2 == 1,
               "has a bias that is not heads x (2 n - 1) with n at least max_len");
  }
  const bool tables = step.key_table >= 0 || step.query_table >= 0;
  check.need(tables || !step.shared_tables, "shares tables that it does not have");
  if (tables) check_tables(check, step, x.cols / 3);
  check.write_f32(step.out, Rows::tokens, x.cols / 3);
}

class AttentionStep final : public Step {
 public:
  AttentionStep(const Binder& binder, const StepDecl& decl, size_t index)
      : decl_(decl), binder_(binder), index_(index), select_("attention", decl.arithmetic, &kernels_) {}

  void run(const Share& share) const override {
    const AttentionArgs args = attention_args(binder_, decl_, share);
    const Chunk& chunk = share.chunk;
    const auto seqs = static_cast<size_t>(chunk.count(Rows::seqs));
    const AttentionTasks tasks({chunk.cu_seqlens.data(), seqs + 1}, {chunk.attention_order.data(), seqs},
                               decl_.heads, share.parts);
    const AttentionFn fn = select_(chunk.count(Rows::tokens));
    const auto one = [&](int64_t index) {
      const AttentionTask task = tasks.at(index);
      fn(args, task.seq, task.head, task.queries.begin, task.queries.end, share.scratch);
    };
    if (share.parts == 1) {
      for (int64_t index = 0; index < tasks.count(); ++index) one(index);
      return;
    }
    // Longest sequences first and each thread takes what is next: one long text does not idle the others.
    std::atomic<int64_t>& next = share.chunk.next_task[index_];
    for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < tasks.count();) one(index);
  }

 private:
  const StepDecl decl_;
  const Binder binder_;
  const size_t index_;
  Selection<AttentionFn> select_;
};

}  // namespace

const StepType step_types::attention = {
    "x bias? key_table? query_table? shared_tables? heads factor reach? unseen? most_unseen? "
    "arithmetic out",
    &check_attention, &bind_as<AttentionStep>};

}  // namespace encast
