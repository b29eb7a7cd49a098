#include "runtime/head_stage.h"

#include <algorithm>

namespace encast {
namespace {

// Rows of the longest sequence that a task takes where head_tokens is less: with many more, they would not
// fit the cache that they are made for.
constexpr int64_t kLongest = 512;

int64_t most_rows(const Plan& plan) {
  return std::min(plan.chunk_tokens, std::max(plan.head_tokens, std::min(plan.max_len, kLongest)));
}

int64_t head_dim_of(const Plan& plan, const StepDecl& attention) {
  return plan.values[static_cast<size_t>(attention.x)].cols / 3 / attention.heads;
}

int64_t task_bytes(int64_t rows, int64_t head_dim) {
  return round_up(rows * 3 * heads_of_panels(head_dim) * head_dim * 4, 64);
}

int64_t attention_bytes(const Plan& plan, const StepDecl& attention) {
  const bool tables = attention.key_table >= 0 || attention.query_table >= 0;
  return attention_scratch_bytes(plan.max_len, head_dim_of(plan, attention), tables);
}

// Of a task, without what a sparse product needs.
int64_t head_scratch_bytes(const Plan& plan, const StepDecl& attention) {
  return task_bytes(most_rows(plan), head_dim_of(plan, attention)) +
         round_up(attention_bytes(plan, attention), 64);
}

}  // namespace

int64_t stage_scratch_bytes(const Plan& plan, const StageDecl& stage) {
  if (stage.kind == StageKind::rows) return 0;
  const StepDecl& attention = plan.steps[stage.end - 1];
  if (stage.kind != StageKind::heads) return attention_bytes(plan, attention);
  const int64_t bytes = head_scratch_bytes(plan, attention);
  const StepDecl& product = plan.steps[stage.begin];
  if (product.kind != StepKind::sparse) return bytes;
  const int64_t k = plan.values[static_cast<size_t>(product.x)].cols;
  return bytes + round_up(sparse_scratch_bytes(k), 64) + features_bytes(most_rows(plan), k);
}

HeadStage::HeadStage(const Plan& plan, const StageDecl& stage, const std::byte* weights)
    : product_(plan.steps[stage.begin]),
      dense_(product_.kind == StepKind::sparse ? dense_form(product_) : product_),
      attention_(plan.steps[stage.begin + 1]),
      binder_(plan, weights),
      after_(binder_.next_weight(stage.begin)),
      most_rows_(most_rows(plan)),
      task_bytes_(head_scratch_bytes(plan, attention_)),
      head_dim_(head_dim_of(plan, attention_)),
      heads_(heads_of_panels(head_dim_)),
      width_(heads_ * head_dim_),
      attend_("attention", attention_.arithmetic) {
  if (product_.kind == StepKind::sparse) {
    skip_ = std::make_unique<const Selection<SparseFn>>("sparse_q8s8", product_.arithmetic);
  }
  if (product_.kind == StepKind::linear || product_.dense >= 0) {
    multiply_ = std::make_unique<const Selection<GemmFn>>(gemm_op(binder_.value(product_.x).dtype),
                                                          product_.arithmetic);
  }
}

int64_t HeadStage::tasks(const Chunk& chunk, int threads) const {
  const int64_t count = chunk.head_groups_used * tasks_a_group();
  if (count == 0 || !tasks_suffice(count, threads)) return 0;
  const Range longest = rows(chunk, 0);
  return longest.end - longest.begin <= most_rows_ ? count : 0;
}

Range HeadStage::seqs(const Chunk& chunk, int64_t task) const {
  return chunk.head_groups[static_cast<size_t>(task / tasks_a_group())];
}

Range HeadStage::rows(const Chunk& chunk, int64_t task) const {
  const Range range = seqs(chunk, task);
  return {chunk.cu_seqlens[static_cast<size_t>(range.begin)],
          chunk.cu_seqlens[static_cast<size_t>(range.end)]};
}

// Where row 0 of the chunk would lie.
float* HeadStage::task_rows(const Share& share) const {
  return reinterpret_cast<float*>(share.scratch) - share.rows.begin * 3 * width_;
}

// The rows of a group are turned to columns for its first task in this thread, and kept for the others.
void HeadStage::project_sparse(const Share& share, Range rows, int64_t task, int64_t last) const {
  const int64_t panels = width_ / kPanel, k = binder_.value(product_.x).cols;
  std::byte* const scratch = share.scratch + task_bytes_;
  SparseArgs args = sparse_args(binder_, product_, share, scratch);
  args.features = reinterpret_cast<uint8_t*>(scratch + round_up(sparse_scratch_bytes(k), 64));
  args.turned = last >= 0 && last / tasks_a_group() == task / tasks_a_group();
  args.product.c_stride = 3 * width_;
  const SparseFn multiply = (*skip_)(rows.end - rows.begin);
  for (int64_t part = 0; part < 3; ++part, args.turned = true) {
    const int64_t panel = (part * tasks_a_group() + task % tasks_a_group()) * panels;
    args.product.c = task_rows(share) + part * width_ - panel * kPanel;
    multiply(args, rows.begin, rows.end, panel, panel + panels);
  }
}

void HeadStage::project(const Share& share, int64_t task, int64_t next, int64_t last) const {
  if (skip_ == nullptr) return project_dense(share, share.rows, task, next);
  const SparseRows rows(product_, share.rows, share.parts);
  if (rows.sparse.begin < rows.sparse.end) project_sparse(share, rows.sparse, task, last);
  if (rows.dense.begin < rows.dense.end) project_dense(share, rows.dense, task, next);
}

void HeadStage::project_dense(const Share& share, Range rows, int64_t task, int64_t next) const {
  const int64_t panels = width_ / kPanel, part_panels = tasks_a_group() * panels;
  const int64_t panel_bytes = binder_.panel_bytes(dense_.w);
  const auto first_panel = [&](int64_t of, int64_t part) {
    return part * part_panels + of % tasks_a_group() * panels;
  };
  GemmArgs args = product_args(binder_, dense_, share);
  const auto* const weights = static_cast<const std::byte*>(args.w);
  const GemmFn multiply = (*multiply_)(rows.end - rows.begin);
  args.c_stride = 3 * width_;
  args.next_w_bytes = panel_bytes;
  args.next_w_panels = panels;
  for (int64_t part = 0; part < 3; ++part) {
    const int64_t panel = first_panel(task, part);
    args.c = task_rows(share) + part * width_ - panel * kPanel;
    if (part < 2) {
      args.next_w = weights + first_panel(task, part + 1) * panel_bytes;
    } else if (next < tasks(share.chunk, share.parts)) {
      args.next_w = weights + first_panel(next, 0) * panel_bytes;
    } else {
      args.next_w = binder_.data<std::byte>(after_);
      args.next_w_bytes = binder_.panel_bytes(after_);
      args.next_w_panels = std::min(panels, binder_.panels(after_));
    }
    multiply(args, rows.begin, rows.end, panel, panel + panels);
  }
}

void HeadStage::attend(const Share& share, int64_t task) const {
  AttentionArgs args = attention_args(binder_, attention_, share);
  const int64_t first_head = task % tasks_a_group() * heads_;
  args.qkv = task_rows(share);
  args.qkv_stride = 3 * width_;
  args.heads = static_cast<int32_t>(heads_);
  if (args.bias != nullptr) args.bias += first_head * (2 * args.bias_len - 1);
  for (const float** table : {&args.key_table, &args.query_table}) {
    if (*table != nullptr && !args.shared_tables) *table += first_head * head_dim_ * args.table_columns;
  }
  args.out += first_head * head_dim_;
  const AttentionFn attend = attend_(share.rows.end - share.rows.begin);
  const Range range = seqs(share.chunk, task);
  std::byte* const scratch = share.scratch + task_bytes(most_rows_, head_dim_);
  for (int64_t seq = range.begin; seq < range.end; ++seq) {
    const int64_t len = share.chunk.cu_seqlens[static_cast<size_t>(seq) + 1] -
                        share.chunk.cu_seqlens[static_cast<size_t>(seq)];
    for (int64_t head = 0; head < heads_; ++head) attend(args, seq, head, 0, len, scratch);
  }
}

}  // namespace encast
