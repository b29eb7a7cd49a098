#include "runtime/step.h"

#include "base/error.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/embed/embed.h"
#include "kernels/norm/norm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/reduce/reduce.h"
#include "parallel/partition.h"
#include "runtime/attention_tasks.h"
#include "runtime/binding.h"

namespace encast {
namespace {

NarrowOut narrow_out(const Share& share, int id, NarrowOut::Kind kind) {
  if (kind == NarrowOut::Kind::none) return {};
  const Place& to = place(share, id);
  return {kind, to.data, to.stride, to.scale, to.zero};
}

// Steps whose kernels take [begin, end) of rows of one kind.
template <class Fn>
class RowStep : public Step {
 protected:
  RowStep(const Binder& binder, const StepDecl& decl, const char* op, Rows rows)
      : decl_(decl), binder_(binder), rows_(rows), select_(op, "f32", &kernels_) {}

  // The operands that all of them have.
  template <class Args>
  Args operands(const Share& share) const {
    Args args;
    args.cols = binder_.value(decl_.x).cols;
    args.x = f32_in(share, decl_.x);
    args.x_stride = stride(share, decl_.x);
    if constexpr (requires { args.out_stride; }) {
      args.out = f32_out(share, decl_.out);
      args.out_stride = stride(share, decl_.out);
    }
    return args;
  }

  template <class Args>
  void run_rows(const Args& args, const Share& share) const {
    const Range range = split(share.rows, 1, share.part, share.parts);
    if (range.begin < range.end) select_(range.end - range.begin)(args, range.begin, range.end);
  }

  const StepDecl decl_;
  const Binder binder_;
  const Rows rows_;
  Selection<Fn> select_;
};

class EmbedStep final : public RowStep<EmbedFn> {
 public:
  EmbedStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "embed_rows", Rows::tokens),
        kind_(binder.narrow_kind(decl.also, decl.zero_point)) {}

  void run(const Share& share) const override {
    EmbedArgs args;
    args.cols = binder_.weight(decl_.word).cols;
    args.token_ids = share.chunk.token_ids;
    args.token_type_ids = share.chunk.token_type_ids;
    args.positions = share.chunk.positions.data();
    args.word = binder_.data<float>(decl_.word);
    args.position = binder_.data<float>(decl_.position);
    args.token_type = binder_.data<float>(decl_.token_type);
    args.gamma = binder_.data<float>(decl_.gamma);
    args.beta = binder_.data<float>(decl_.beta);
    args.eps = decl_.eps;
    args.out = f32_out(share, decl_.out);
    args.out_stride = stride(share, decl_.out);
    args.narrow = narrow_out(share, decl_.also, kind_);
    run_rows(args, share);
  }

 private:
  const NarrowOut::Kind kind_;
};

class NormStep final : public RowStep<NormFn> {
 public:
  NormStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "norm_rows", binder.value(decl.x).rows),
        kind_(binder.narrow_kind(decl.also, decl.zero_point)) {}

  void run(const Share& share) const override {
    auto args = operands<NormArgs>(share);
    args.residual = f32_in(share, decl_.other);
    args.residual_stride = stride(share, decl_.other);
    args.gamma = binder_.data<float>(decl_.gamma);
    args.beta = binder_.data<float>(decl_.beta);
    args.eps = decl_.eps;
    args.narrow = narrow_out(share, decl_.also, kind_);
    run_rows(args, share);
  }

 private:
  const NarrowOut::Kind kind_;
};

class NarrowStep final : public RowStep<NarrowFn> {
 public:
  NarrowStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "narrow_rows", binder.value(decl.x).rows),
        kind_(binder.narrow_kind(decl.out, decl.zero_point)) {}

  void run(const Share& share) const override {
    auto args = operands<NarrowArgs>(share);
    args.out = narrow_out(share, decl_.out, kind_);
    run_rows(args, share);
  }

 private:
  const NarrowOut::Kind kind_;
};

class ElementwiseStep final : public RowStep<ElementwiseFn> {
 public:
  ElementwiseStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "elementwise_rows", binder.value(decl.x).rows) {}

  void run(const Share& share) const override {
    auto args = operands<ElementwiseArgs>(share);
    args.other = f32_in(share, decl_.other);
    args.other_stride = stride(share, decl_.other);
    args.factor = decl_.factor;
    args.activation = decl_.act;
    args.exact = binder_.exact();
    run_rows(args, share);
  }
};

class PoolStep final : public RowStep<PoolFn> {
 public:
  PoolStep(const Binder& binder, const StepDecl& decl) : RowStep(binder, decl, "pool_rows", Rows::seqs) {}

  void run(const Share& share) const override {
    auto args = operands<PoolArgs>(share);
    args.cu_seqlens = share.chunk.cu_seqlens.data();
    args.mode = decl_.mode;
    args.out += decl_.column;
    run_rows(args, share);
  }
};

class GatherStep final : public RowStep<GatherFn> {
 public:
  GatherStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "gather_rows", decl.kind == StepKind::first ? Rows::seqs : Rows::selected) {}

  void run(const Share& share) const override {
    auto args = operands<GatherArgs>(share);
    args.rows =
        decl_.kind == StepKind::first ? share.chunk.first_rows.data() : share.chunk.selected_rows.data();
    run_rows(args, share);
  }
};

class NormalizeStep final : public RowStep<NormalizeFn> {
 public:
  NormalizeStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "normalize_rows", binder.value(decl.x).rows) {}

  void run(const Share& share) const override {
    auto args = operands<NormalizeArgs>(share);
    run_rows(args, share);
  }
};

class LinearStep final : public Step {
 public:
  LinearStep(const Binder& binder, const StepDecl& decl, size_t index)
      : decl_(decl),
        binder_(binder),
        next_w_(binder.next_weight(index)),
        rounds_(binder.value(decl.out).dtype == DType::bf16),
        select_(gemm_op(binder.value(decl.x).dtype), decl.arithmetic, &kernels_) {
    tiles_ = select_.tiles();
  }

  void run(const Share& share) const override {
    GemmArgs args = product_args(binder_, decl_, share);
    if (rounds_) {
      args.c_bf16 = reinterpret_cast<uint16_t*>(place(share, decl_.out).data) + decl_.column;
    } else {
      args.c = f32_out(share, decl_.out) + decl_.column;
    }
    args.c_stride = stride(share, decl_.out);
    const Tile tile = tile_of(decl_.w, share);
    const int64_t next_panel = binder_.panel_bytes(next_w_);
    const Range next_panels = tile_of(next_w_, share).panels;
    args.next_w = binder_.data<std::byte>(next_w_) + next_panels.begin * next_panel;
    args.next_w_bytes = next_panel;
    args.next_w_panels = next_panels.end - next_panels.begin;
    if (tile.rows.begin < tile.rows.end && tile.panels.begin < tile.panels.end) {
      select_(share.rows.end - share.rows.begin)(args, tile.rows.begin, tile.rows.end, tile.panels.begin,
                                                 tile.panels.end);
    }
  }

 private:
  Tile tile_of(int weight, const Share& share) const {
    return split_product(share.rows, binder_.panels(weight), share.part, share.parts, tiles());
  }

  const StepDecl decl_;
  const Binder binder_;
  const int next_w_;
  const bool rounds_;  // its outputs to bf16
  Selection<GemmFn> select_;
};

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

std::unique_ptr<Step> bind_step(const Plan& plan, size_t index, const std::byte* weights) {
  const StepDecl& decl = plan.steps[index];
  const Binder binder(plan, weights);
  switch (decl.kind) {
    case StepKind::embed:
      return std::make_unique<EmbedStep>(binder, decl);
    case StepKind::norm:
      return std::make_unique<NormStep>(binder, decl);
    case StepKind::linear:
      return std::make_unique<LinearStep>(binder, decl, index);
    case StepKind::attention:
      return std::make_unique<AttentionStep>(binder, decl, index);
    case StepKind::narrow:
      return std::make_unique<NarrowStep>(binder, decl);
    case StepKind::elementwise:
      return std::make_unique<ElementwiseStep>(binder, decl);
    case StepKind::pool:
      return std::make_unique<PoolStep>(binder, decl);
    case StepKind::first:
    case StepKind::select:
      return std::make_unique<GatherStep>(binder, decl);
    case StepKind::normalize:
      return std::make_unique<NormalizeStep>(binder, decl);
  }
  throw PlanError("unknown kind of step");
}

}  // namespace encast
