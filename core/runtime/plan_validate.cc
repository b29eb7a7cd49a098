#include <algorithm>
#include <span>
#include <string>

#include "base/error.h"
#include "runtime/head_tasks.h"
#include "runtime/plan_parse.h"

namespace encast {
namespace {

// Rows of the widest batch that the arena must hold.
int64_t capacity(const Plan& plan) { return plan.chunk_tokens; }

class Validator {
 public:
  explicit Validator(const Plan& plan) : plan_(plan) {}

  void run() {
    if (plan_.block_rows % ValueDecl::kBlockUnit != 0) {
      throw PlanError("block_rows is no multiple of " + std::to_string(ValueDecl::kBlockUnit));
    }
    if (plan_.block % 64 != 0)
      throw PlanError("block is no multiple of 64: threads' blocks lie side by side");
    check_places();
    made_.assign(plan_.values.size(), 0);
    for (index_ = 0; index_ < plan_.steps.size(); ++index_) check_step(plan_.steps[index_]);
    if (plan_.outputs.empty()) throw PlanError("the plan has no output");
    for (const OutputDecl& output : plan_.outputs) {
      const ValueDecl& value = plan_.values[static_cast<size_t>(output.value)];
      if (!is_made(output.value) || value.dtype != DType::f32) {
        throw PlanError("output " + output.name + " is never made, or not f32");
      }
      if (value.in_block) throw PlanError("output " + output.name + " lies in the memory of a block");
    }
    for (size_t number = 0; number < plan_.stages.size(); ++number) check_stage(number);
    check_lifetimes();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const StepDecl& step = plan_.steps[index_];
    throw PlanError("plan step " + std::to_string(index_) + " (" + step_name(step.kind) + " " +
                    step.name.substr(0, 80) + "): " + what);
  }
  void need(bool condition, const char* what) const {
    if (!condition) fail(what);
  }

  // Bytes of a value where it lies: in the arena, or in the memory of a block.
  int64_t bytes(const ValueDecl& value) const {
    return value.bytes(value.in_block ? ValueDecl::kBlockUnit : capacity(plan_));
  }

  void check_places() const {
    for (size_t id = 0; id < plan_.values.size(); ++id) {
      const ValueDecl& value = plan_.values[id];
      if (value.offset == ValueDecl::kCallerMemory) continue;
      const int64_t size = value.in_block ? plan_.block : plan_.arena;
      if (value.offset % 64 != 0 || value.offset > size || bytes(value) > size - value.offset) {
        throw PlanError("value v" + std::to_string(id) + " does not lie 64-byte aligned inside of the " +
                        (value.in_block ? "block" : "arena") + " of " + std::to_string(size) + " bytes");
      }
    }
  }

  bool is_made(int id) const {
    return made_[static_cast<size_t>(id)] == plan_.values[static_cast<size_t>(id)].cols;
  }
  const ValueDecl& read(int id, DType dtype) const {
    need(id >= 0 && is_made(id), "reads a value that no step before it makes");
    const ValueDecl& value = plan_.values[static_cast<size_t>(id)];
    need(value.dtype == dtype, "reads a value of the wrong dtype");
    need(value.offset != ValueDecl::kCallerMemory, "reads a value that lies in the caller's memory");
    return value;
  }
  const ValueDecl& write(int id, Rows rows, int64_t cols) {
    need(id >= 0, "writes no value");
    const ValueDecl& value = plan_.values[static_cast<size_t>(id)];
    need(made_[static_cast<size_t>(id)] == 0, "makes a value a second time");
    need(value.rows == rows && value.cols == cols, "makes a value of the wrong shape");
    made_[static_cast<size_t>(id)] = cols;
    return value;
  }
  // A part of a value's columns. Parts come side by side, so that none is left as the memory was.
  const ValueDecl& write_part(int id, Rows rows, int64_t column, int64_t cols) {
    need(id >= 0, "writes no value");
    const ValueDecl& value = plan_.values[static_cast<size_t>(id)];
    int64_t& made = made_[static_cast<size_t>(id)];
    need(value.rows == rows, "makes a value of the wrong shape");
    need(column == made && made + cols <= value.cols, "makes columns other than the next ones of the value");
    made += cols;
    return value;
  }
  void write_f32(int id, Rows rows, int64_t cols) {
    need(write(id, rows, cols).dtype == DType::f32, "makes a value of the wrong dtype");
  }
  void write_narrow(int id, Rows rows, int64_t cols) {
    const int out = plan_.steps[index_].out;
    need(out == id || plan_.values[static_cast<size_t>(out)].offset != ValueDecl::kCallerMemory,
         "makes a narrow copy of a value in the caller's memory");
    const ValueDecl& value = write(id, rows, cols);
    need(value.dtype != DType::f32, "makes a narrow copy that is f32");
    need(value.offset != ValueDecl::kCallerMemory, "makes a narrow copy in the caller's memory");
  }
  const WeightDecl& weight(int id, DType dtype, WeightLayout layout) const {
    need(id >= 0, "lacks a weight");
    const WeightDecl& found = plan_.weights[static_cast<size_t>(id)];
    need(found.dtype == dtype && found.layout == layout, "has a weight of the wrong dtype or layout");
    return found;
  }
  void vector(int id, DType dtype, WeightLayout layout, int64_t cols) const {
    const WeightDecl& found = weight(id, dtype, layout);
    need(found.rows == 1 && found.cols == cols, "has a vector of the wrong size");
  }
  void norm_vectors(const StepDecl& step, int64_t cols) const {
    vector(step.gamma, DType::f32, WeightLayout::dense, cols);
    vector(step.beta, DType::f32, WeightLayout::dense, cols);
    need(step.eps >= 0, "has a negative eps");
  }

  void check_step(const StepDecl& step) {
    switch (step.kind) {
      case StepKind::embed:
        return check_embed(step);
      case StepKind::norm: {
        const ValueDecl& x = read(step.x, DType::f32);
        if (step.other >= 0) need(same(x, read(step.other, DType::f32)), "adds values of unlike shapes");
        norm_vectors(step, x.cols);
        write_f32(step.out, x.rows, x.cols);
        if (step.also >= 0) write_narrow(step.also, x.rows, x.cols);
        return;
      }
      case StepKind::linear:
        return check_linear(step);
      case StepKind::attention:
        return check_attention(step);
      case StepKind::narrow: {
        const ValueDecl& x = read(step.x, DType::f32);
        write_narrow(step.out, x.rows, x.cols);
        return;
      }
      case StepKind::elementwise: {
        const ValueDecl& x = read(step.x, DType::f32);
        if (step.other >= 0) need(same(x, read(step.other, DType::f32)), "adds values of unlike shapes");
        write_f32(step.out, x.rows, x.cols);
        return;
      }
      case StepKind::pool: {
        const ValueDecl& x = read(step.x, DType::f32);
        need(x.rows == Rows::tokens, "pools rows that are not tokens");
        const ValueDecl& out = write_part(step.out, Rows::seqs, step.column, x.cols);
        need(out.dtype == DType::f32, "makes a value of the wrong dtype");
        return;
      }
      case StepKind::first:
      case StepKind::select: {
        const ValueDecl& x = read(step.x, DType::f32);
        need(x.rows == Rows::tokens, "gathers from rows that are not tokens");
        write_f32(step.out, step.kind == StepKind::first ? Rows::seqs : Rows::selected, x.cols);
        return;
      }
      case StepKind::normalize: {
        const ValueDecl& x = read(step.x, DType::f32);
        write_f32(step.out, x.rows, x.cols);
        return;
      }
    }
  }

  static bool same(const ValueDecl& a, const ValueDecl& b) { return a.rows == b.rows && a.cols == b.cols; }

  void check_embed(const StepDecl& step) {
    need(!embeds_, "is a second embed; positions are counted for one");
    embeds_ = true;
    const WeightDecl& word = weight(step.word, DType::f32, WeightLayout::dense);
    need(word.rows >= plan_.vocab, "has fewer word rows than the vocabulary");
    if (step.position >= 0) {
      const WeightDecl& position = weight(step.position, DType::f32, WeightLayout::dense);
      need(position.cols == word.cols, "has tables of unlike widths");
      need(position.rows >= plan_.max_len + step.offset, "has too few positions for max_len");
      need(step.skip < 0 || step.offset >= 1, "skips a token, which needs an offset of at least 1");
    }
    if (step.token_type >= 0) {
      const WeightDecl& types = weight(step.token_type, DType::f32, WeightLayout::dense);
      need(types.cols == word.cols, "has tables of unlike widths");
      need(types.rows >= plan_.types && plan_.types >= 1, "has fewer token types than the limits say");
    }
    need((step.gamma < 0) == (step.beta < 0), "has gamma or beta alone");
    if (step.gamma >= 0) norm_vectors(step, word.cols);
    write_f32(step.out, Rows::tokens, word.cols);
    if (step.also >= 0) write_narrow(step.also, Rows::tokens, word.cols);
  }

  void check_linear(const StepDecl& step) {
    need(step.x >= 0, "lacks x");
    const DType dtype = plan_.values[static_cast<size_t>(step.x)].dtype;
    const ValueDecl& x = read(step.x, dtype);
    const WeightDecl& w = weight(step.w, dtype == DType::q8 ? DType::s8 : dtype, WeightLayout::panels);
    need(w.cols == x.cols, "multiplies values of unlike inner sizes");
    need((dtype == DType::q8) == (step.scale >= 0) && (dtype == DType::q8) == (step.colsum >= 0),
         "needs scale and colsum for q8, and neither otherwise");
    if (dtype == DType::q8) {
      // 255 * 127 * k must fit an int32 sum.
      need(w.cols <= 65536, "has an inner size whose integer sums may overflow");
      vector(step.scale, DType::f32, WeightLayout::padded, w.rows);
      vector(step.colsum, DType::i32, WeightLayout::padded, w.rows);
    }
    if (step.bias >= 0) vector(step.bias, DType::f32, WeightLayout::padded, w.rows);
    // Kernels write whole panels, and fill the padding of narrow rows after the last one.
    need(step.column % kPanel == 0, "makes columns that do not begin a panel");
    const ValueDecl& out = write_part(step.out, x.rows, step.column, w.rows);
    need(out.dtype == DType::f32 || out.dtype == DType::bf16, "makes a value of the wrong dtype");
  }

  void check_attention(const StepDecl& step) {
    const ValueDecl& x = read(step.x, DType::f32);
    need(x.rows == Rows::tokens && x.cols % (3 * int64_t{step.heads}) == 0,
         "has columns that are not 3 x heads");
    // 255 * 127 * columns must fit an int32 sum, and 127 * 127 * columns the integers of an f32.
    need(x.cols / 3 / step.heads <= 1024, "has heads wider than 1024");
    need(step.factor > 0, "has a factor that is not positive");
    if (step.bias >= 0) {
      const WeightDecl& bias = weight(step.bias, DType::f32, WeightLayout::dense);
      need(bias.rows == step.heads && bias.cols >= 2 * plan_.max_len - 1 && bias.cols % 2 == 1,
           "has a bias that is not heads x (2 n - 1) with n at least max_len");
    }
    write_f32(step.out, Rows::tokens, x.cols / 3);
  }

  [[noreturn]] void fail_stage(size_t number, const std::string& what) const {
    throw PlanError("plan stage " + std::to_string(number) + " (" + stage_name(plan_.stages[number].kind) +
                    "): " + what);
  }

  // That a stage holds the steps that its kind may. In a stage of rows each row then depends on the same row
  // of what the stage makes: those steps that read other rows than they make, like pooling, also make rows of
  // another kind, and so read what an earlier stage made.
  void check_stage(size_t number) const {
    const StageDecl& stage = plan_.stages[number];
    const std::span<const StepDecl> steps(plan_.steps.begin() + static_cast<std::ptrdiff_t>(stage.begin),
                                          stage.end - stage.begin);
    const auto is_attention = [](const StepDecl& step) { return step.kind == StepKind::attention; };
    switch (stage.kind) {
      case StageKind::rows: {
        const auto rows = [&](const StepDecl& step) {
          return plan_.values[static_cast<size_t>(step.out)].rows;
        };
        const auto unlike = [&](const StepDecl& step) { return rows(step) != rows(steps[0]); };
        if (std::ranges::any_of(steps, is_attention)) fail_stage(number, "attention mixes rows");
        if (std::ranges::any_of(steps, unlike)) fail_stage(number, "its steps make rows of unlike kinds");
        return;
      }
      case StageKind::sequences:
        if (steps.size() != 1 || !is_attention(steps[0])) fail_stage(number, "holds more than one attention");
        return;
      case StageKind::heads:
        return check_heads(number, steps);
    }
  }

  void check_heads(size_t number, std::span<const StepDecl> steps) const {
    const auto need = [&](bool condition, const char* what) {
      if (!condition) fail_stage(number, what);
    };
    need(plan_.head_tokens > 0, "head_tokens is 0");
    need(steps.size() == 2 && steps[0].kind == StepKind::linear && steps[1].kind == StepKind::attention,
         "holds other steps than a product and an attention");
    const int id = steps[1].x;
    const int64_t cols = plan_.values[static_cast<size_t>(id)].cols;
    need(steps[0].out == id && plan_.weights[static_cast<size_t>(steps[0].w)].rows == cols,
         "its product does not make all that its attention reads");
    need(heads_fill_panels(steps[1].heads, cols / 3 / steps[1].heads), "its heads do not fill panels");
    const auto reads = [&](const StepDecl& step) { return step.x == id || step.other == id; };
    const auto is_output = [&](const OutputDecl& output) { return output.value == id; };
    need(std::ranges::count_if(plan_.steps, reads) == 1 && std::ranges::none_of(plan_.outputs, is_output),
         "others than its attention read what its product makes");
  }

  // Steps from the one that makes a value to the last that reads it.
  struct Life {
    size_t first = ~size_t{0}, last = 0;
  };

  // No step may write memory that holds a value which it or a later step still reads. Values of the arena
  // live for whole stages: while one thread is at a stage's last step, another may be at its first.
  void check_lifetimes() const {
    std::vector<Life> lives(plan_.values.size());
    for (const StageDecl& stage : plan_.stages) {
      for (size_t step = stage.begin; step < stage.end; ++step) {
        const StepDecl& decl = plan_.steps[step];
        for (int id : {decl.x, decl.other, decl.out, decl.also}) {
          if (id >= 0) live_through(lives[static_cast<size_t>(id)], id, stage, step);
        }
      }
    }
    check_overlaps(lives);
  }

  void live_through(Life& life, int id, const StageDecl& stage, size_t step) const {
    const bool in_block = plan_.values[static_cast<size_t>(id)].in_block;
    const auto fail_block = [&](const char* why) {
      throw PlanError("plan step " + std::to_string(step) + ": v" + std::to_string(id) +
                      " lies in the memory of a block, " + why);
    };
    if (in_block && stage.kind != StageKind::rows) fail_block("but the stage of an attention has no blocks");
    if (in_block && life.first < stage.begin) fail_block("which ended with an earlier stage");
    life.first = std::min(life.first, in_block ? step : stage.begin);
    life.last = std::max(life.last, in_block ? step : stage.end - 1);
  }

  void check_overlaps(const std::vector<Life>& lives) const {
    std::vector<size_t> ids;
    for (size_t id = 0; id < lives.size(); ++id) {
      const bool placed = plan_.values[id].offset != ValueDecl::kCallerMemory;
      if (placed && lives[id].first <= lives[id].last) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end(), [&](size_t a, size_t b) { return lives[a].first < lives[b].first; });
    std::vector<size_t> live;
    for (const size_t id : ids) {
      const ValueDecl& value = plan_.values[id];
      std::erase_if(live, [&](size_t other) { return lives[other].last < lives[id].first; });
      for (const size_t other : live) {
        const ValueDecl& held = plan_.values[other];
        if (value.in_block == held.in_block && value.offset < held.offset + bytes(held) &&
            held.offset < value.offset + bytes(value)) {
          throw PlanError("v" + std::to_string(id) + " lies over v" + std::to_string(other) +
                          " while both are alive");
        }
      }
      live.push_back(id);
    }
  }

  const Plan& plan_;
  size_t index_ = 0;
  std::vector<int64_t> made_;  // columns of every value that steps have made
  bool embeds_ = false;
};

}  // namespace

void validate_plan(const Plan& plan) { Validator(plan).run(); }

// By walking back from it.
std::vector<bool> Plan::needed_steps(int value) const {
  std::vector<bool> wanted(values.size(), false), needed(steps.size(), false);
  wanted[static_cast<size_t>(value)] = true;
  for (size_t index = steps.size(); index-- > 0;) {
    const StepDecl& step = steps[index];
    needed[index] =
        wanted[static_cast<size_t>(step.out)] || (step.also >= 0 && wanted[static_cast<size_t>(step.also)]);
    if (!needed[index]) continue;
    for (int id : {step.x, step.other}) {
      if (id >= 0) wanted[static_cast<size_t>(id)] = true;
    }
  }
  return needed;
}

uint64_t WeightDecl::bytes() const {
  const auto element = static_cast<int64_t>(element_bytes(dtype));
  switch (layout) {
    case WeightLayout::dense:
      return static_cast<uint64_t>(rows * cols * element);
    case WeightLayout::padded:
      return static_cast<uint64_t>(rows * round_up(cols, kPanel) * element);
    case WeightLayout::panels:
      return static_cast<uint64_t>(round_up(rows, kPanel) * round_up(cols, panel_group(dtype)) * element);
  }
  return 0;
}

void Plan::check_weights(uint64_t file_bytes) const {
  for (size_t id = 0; id < weights.size(); ++id) {
    const WeightDecl& weight = weights[id];
    if (weight.offset % 64 != 0 || weight.offset > file_bytes ||
        weight.bytes() > file_bytes - weight.offset) {
      throw PlanError("weight w" + std::to_string(id) +
                      " does not lie 64-byte aligned inside of the weights file of " +
                      std::to_string(file_bytes) + " bytes");
    }
  }
}

}  // namespace encast
