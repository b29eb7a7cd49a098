#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "kernels/attention/attention.h"
#include "kernels/catalog.h"
#include "kernels/gemm/gemm.h"
#include "kernels/rows.h"
#include "kernels/sparse/sparse.h"
#include "runtime/step.h"

// What steps are bound with: kernels by class and number of rows, weights and values by the plan's ids, and
// the arguments of the kernels that more than one class of steps calls.
namespace encast {

// The members of one arithmetic class that selection would pick, by number of rows.
template <class Fn>
class Selection {
 public:
  // Adds the names of its kernels to `names`.
  Selection(std::string_view op, std::string_view arithmetic, std::vector<std::string>* names = nullptr) {
    for (const KernelInfo& row : all_kernels()) {
      if (row.op != op || row.arithmetic != arithmetic) continue;
      const KernelInfo* best = select_kernel(op, arithmetic, row.min_rows);
      if (best == nullptr || best->min_rows != row.min_rows) continue;
      const auto fn = reinterpret_cast<Fn>(best->fn);
      bool known = false;
      for (const Choice& choice : choices_) known = known || choice.fn == fn;
      if (known) continue;
      choices_.push_back({best->min_rows, fn});
      tiles_ = tiles_ || best->isa == Isa::amx;
      if (names != nullptr) names->emplace_back(best->name);
    }
    if (choices_.empty()) {
      throw ResourceError("no kernel of " + std::string(op) + " with arithmetic '" +
                          std::string(arithmetic.substr(0, 40)) + "' may run on this machine at ENCAST_ISA=" +
                          isa_name(isa_best()) + "; open the artifact again to plan it for this machine");
    }
  }

  Fn operator()(int64_t rows) const {
    const Choice* found = &choices_.front();
    for (const Choice& choice : choices_) {
      if (choice.min_rows <= rows && choice.min_rows >= found->min_rows) found = &choice;
    }
    return found->fn;
  }
  // Whether some of them work on tiles of AMX.
  bool tiles() const { return tiles_; }

 private:
  struct Choice {
    int64_t min_rows;
    Fn fn;
  };
  std::vector<Choice> choices_;
  bool tiles_ = false;
};

class Binder {
 public:
  Binder(const Plan& plan, const std::byte* weights) : plan_(plan), weights_(weights) {}

  const ValueDecl& value(int id) const { return plan_.values[static_cast<size_t>(id)]; }
  const WeightDecl& weight(int id) const { return plan_.weights[static_cast<size_t>(id)]; }
  template <class T>
  const T* data(int id) const {
    return id < 0 ? nullptr : reinterpret_cast<const T*>(weights_ + weight(id).offset);
  }
  bool exact() const { return plan_.exact; }
  const Plan& plan() const { return plan_; }

  int64_t panels(int id) const { return round_up(weight(id).rows, kPanel) / kPanel; }
  int64_t panel_bytes(int id) const { return static_cast<int64_t>(weight(id).bytes()) / panels(id); }

  // The panels of the product after step `index`; its own where there is none, or one without panels.
  int next_weight(size_t index) const {
    for (size_t next = index + 1; next < plan_.steps.size(); ++next) {
      const StepDecl& step = plan_.steps[next];
      if (step.kind == StepKind::linear) return step.w;
      if (step.kind == StepKind::sparse && step.dense >= 0) return step.dense;
      if (step.kind == StepKind::sparse) break;
    }
    const StepDecl& own = plan_.steps[index];
    return own.dense >= 0 ? own.dense : own.w;
  }

  // How a step makes value `id`, without the memory that it goes to.
  NarrowOut narrow_form(int id, const StepDecl& step) const {
    NarrowOut form;
    if (id < 0) return form;
    if (value(id).dtype == DType::bf16) {
      form.kind = NarrowOut::Kind::bf16;
    } else if (step.q8_scale > 0) {
      form.kind = NarrowOut::Kind::q8_fixed;
      form.fixed_scale = step.q8_scale;
      form.fixed_zero = step.q8_zero;
    } else {
      form.kind = step.zero_point ? NarrowOut::Kind::q8_zero_point : NarrowOut::Kind::q8_symmetric;
    }
    return form;
  }

 private:
  const Plan& plan_;
  const std::byte* weights_;
};

inline const Place& place(const Share& share, int id) { return share.places[static_cast<size_t>(id)]; }
inline const float* f32_in(const Share& share, int id) {
  return id < 0 ? nullptr : reinterpret_cast<const float*>(place(share, id).data);
}
inline float* f32_out(const Share& share, int id) { return reinterpret_cast<float*>(place(share, id).data); }
inline int64_t stride(const Share& share, int id) { return id < 0 ? 0 : place(share, id).stride; }

inline const char* gemm_op(DType x) {
  switch (x) {
    case DType::q8:
      return "gemm_q8s8";
    case DType::bf16:
      return "gemm_bf16";
    default:
      return "gemm_f32";
  }
}

// All but where outputs go, and what is read next.
inline GemmArgs product_args(const Binder& binder, const StepDecl& decl, const Share& share) {
  const Place& from = place(share, decl.x);
  GemmArgs args;
  args.m = share.rows.end;
  args.n = binder.weight(decl.w).rows;
  args.k = binder.value(decl.x).cols;
  args.a = from.data;
  args.a_stride = from.stride;
  args.a_scale = from.scale;
  args.a_zero = from.zero;
  args.w = binder.data<std::byte>(decl.w);
  args.w_scale = binder.data<float>(decl.scale);
  args.w_colsum = binder.data<int32_t>(decl.colsum);
  args.bias = binder.data<float>(decl.bias);
  args.residual = f32_in(share, decl.other);
  args.residual_stride = stride(share, decl.other);
  args.activation = decl.act;
  args.exact = binder.exact();
  args.coarse = decl.coarse;
  return args;
}

inline SparseWeight sparse_weight(const Binder& binder, const StepDecl& decl) {
  return {binder.data<int8_t>(decl.w), binder.data<uint16_t>(decl.columns),
          binder.data<int32_t>(decl.starts)};
}

// Likewise of a sparse product. Its weight has rows of groups, so that outputs are counted by their scales.
inline SparseArgs sparse_args(const Binder& binder, const StepDecl& decl, const Share& share,
                              std::byte* scratch) {
  SparseArgs args{product_args(binder, decl, share), sparse_weight(binder, decl), scratch};
  args.product.n = binder.weight(decl.scale).cols;
  return args;
}

// The product of few rows, of a sparse one that has its weight in panels too.
inline StepDecl dense_form(const StepDecl& sparse) {
  StepDecl dense = sparse;
  dense.kind = StepKind::linear;
  dense.w = sparse.dense;
  return dense;
}

// Cuts the rows of a sparse product: those that it multiplies, and those that dense_form does. A thread alone
// has whole tiles and a rest. Threads that share the product, or the tasks of heads of some rows, each turn
// all of those to columns, which pays for twice as many (measured with two threads).
struct SparseRows {
  Range sparse, dense;

  SparseRows(const StepDecl& decl, Range rows, int parts) {
    const int64_t count = rows.end - rows.begin, rest = parts > 1 ? count : count % kTileRows;
    const bool few = rest <= (parts > 1 ? 2 : 1) * decl.dense_rows;
    const int64_t cut = few ? rows.end - rest : rows.end;
    sparse = {rows.begin, cut};
    dense = {cut, rows.end};
  }
};

// Of all heads, over rows that lie as the plan says.
inline AttentionArgs attention_args(const Binder& binder, const StepDecl& decl, const Share& share) {
  AttentionArgs args;
  args.qkv = f32_in(share, decl.x);
  args.qkv_stride = stride(share, decl.x);
  args.cu_seqlens = share.chunk.cu_seqlens.data();
  args.heads = decl.heads;
  args.head_dim = static_cast<int32_t>(binder.value(decl.x).cols / 3 / decl.heads);
  args.scale = decl.factor;
  args.bias = binder.data<float>(decl.bias);
  args.bias_len = decl.bias < 0 ? 0 : (binder.weight(decl.bias).cols + 1) / 2;
  args.reach = decl.reach;
  args.seen = decl.unseen < 0 ? nullptr : share.chunk.seen.data();
  args.key_table = binder.data<float>(decl.key_table);
  args.query_table = binder.data<float>(decl.query_table);
  if (const int table = decl.key_table < 0 ? decl.query_table : decl.key_table; table >= 0) {
    args.shared_tables = decl.shared_tables;
    args.table_columns =
        binder.weight(table).rows / (decl.shared_tables ? 1 : args.heads) / args.head_dim * 16;
  }
  args.out = f32_out(share, decl.out);
  args.out_stride = stride(share, decl.out);
  args.exact = binder.exact();
  return args;
}

}  // namespace encast
