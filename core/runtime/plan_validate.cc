#include <algorithm>
#include <span>
#include <string>

#include "base/error.h"
#include "runtime/head_tasks.h"
#include "runtime/plan_parse.h"
#include "runtime/steps/step_type.h"

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
    StepCheck check(plan_);
    for (size_t index = 0; index < plan_.steps.size(); ++index) {
      check.at(index);
      step_type(plan_.steps[index].kind).check(check, plan_.steps[index]);
    }
    if (plan_.outputs.empty()) throw PlanError("the plan has no output");
    for (const OutputDecl& output : plan_.outputs) {
      const ValueDecl& value = plan_.values[static_cast<size_t>(output.value)];
      if (!check.is_made(output.value) || value.dtype != DType::f32) {
        throw PlanError("output " + output.name + " is never made, or not f32");
      }
      if (value.in_block) throw PlanError("output " + output.name + " lies in the memory of a block");
    }
    for (size_t number = 0; number < plan_.stages.size(); ++number) check_stage(number);
    check_lifetimes();
  }

 private:
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

  [[noreturn]] void fail_stage(size_t number, const std::string& what) const {
    throw PlanError("plan stage " + std::to_string(number) + " (" + stage_name(plan_.stages[number].kind) +
                    "): " + what);
  }

  // That a stage holds the steps that its kind may. In a stage of rows each row then depends on the same row
  // of what the stage makes: those steps that read other rows than they make, like pooling, also make rows of
  // another kind, and so read what an earlier stage made. A window makes rows of the same kind, and is told
  // apart.
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
        for (const StepDecl& step : steps) {
          if (step.kind != StepKind::window) continue;
          const auto makes = [&](const StepDecl& other) {
            return other.out == step.x || other.also == step.x;
          };
          if (std::ranges::any_of(steps, makes)) fail_stage(number, "a window reads rows that it makes");
        }
        return;
      }
      case StageKind::sequences:
        if (steps.size() != 1 || !is_attention(steps[0]))
          fail_stage(number, "holds other steps than one attention");
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
    const bool product = steps[0].kind == StepKind::linear || steps[0].kind == StepKind::sparse;
    need(steps.size() == 2 && product && steps[1].kind == StepKind::attention,
         "holds other steps than a product and an attention");
    const int id = steps[1].x;
    const int64_t cols = plan_.values[static_cast<size_t>(id)].cols;
    const int64_t made = steps[0].kind == StepKind::sparse
                             ? plan_.weights[static_cast<size_t>(steps[0].scale)].cols
                             : plan_.weights[static_cast<size_t>(steps[0].w)].rows;
    need(steps[0].out == id && made == cols, "its product does not make all that its attention reads");
    need(steps[0].other < 0, "its product adds a value");
    need(heads_fill_panels(steps[1].heads, cols / 3 / steps[1].heads), "its heads do not fill panels");
    const auto reads = [&](const StepDecl& step) { return step.x == id || step.other == id; };
    const auto is_output = [&](const OutputDecl& output) { return output.value == id; };
    need(std::ranges::count_if(plan_.steps, reads) == 1 && std::ranges::none_of(plan_.outputs, is_output),
         "others than its attention read what its product makes");
  }

  // Steps from the one that makes a value to the last that reads it; of a value of the arena, those of whole
  // stages, and made and read as they are.
  struct Life {
    size_t first = ~size_t{0}, last = 0;
    size_t made = ~size_t{0}, read = 0;
  };

  // No step may write memory that holds a value which it or a later step still reads. Values of the arena
  // live for whole stages: while one thread is at a stage's last step, another may be at its first; but see
  // may_lie_over.
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
    life.made = std::min(life.made, step);
    life.read = std::max(life.read, step);
  }

  // Whether value `made` may lie where `held` does, which ends in the stage that it begins in: each row is
  // made after the same row of `held` was read for the last time, by the same thread or before a barrier.
  bool may_lie_over(size_t made, size_t held, const std::vector<Life>& lives) const {
    const ValueDecl &value = plan_.values[made], &old = plan_.values[held];
    if (value.in_block || value.offset != old.offset || value.dtype != old.dtype || value.rows != old.rows ||
        value.cols != old.cols || lives[held].read >= lives[made].made) {
      return false;
    }
    const auto within = [&](const StageDecl& stage) {
      return stage.begin <= lives[held].read && lives[made].made < stage.end;
    };
    const auto stage = std::ranges::find_if(plan_.stages, within);
    if (stage == plan_.stages.end() || stage->kind != StageKind::rows) return false;
    const auto steps = std::span(plan_.steps).subspan(stage->begin, stage->end - stage->begin);
    return std::ranges::none_of(steps, [&](const StepDecl& step) {
      return step.kind == StepKind::window && step.x == static_cast<int>(held);
    });
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
            held.offset < value.offset + bytes(value) && !may_lie_over(id, other, lives) &&
            !may_lie_over(other, id, lives)) {
          throw PlanError("v" + std::to_string(id) + " lies over v" + std::to_string(other) +
                          " while both are alive");
        }
      }
      live.push_back(id);
    }
  }

  const Plan& plan_;
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
