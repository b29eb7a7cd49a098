#include "runtime/plan_parse.h"

#include <locale.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "runtime/step_keys.h"

namespace encast {
namespace {

constexpr size_t kMaxText = size_t{64} << 20;
constexpr size_t kMaxLines = size_t{1}
                             << 16;  // twenty times the deepest model's; checks are quadratic in them
constexpr size_t kMaxOutputs = 64;
constexpr int64_t kMaxTokens = int64_t{1} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 46;
constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;  // kMaxBytes for kMaxTokens rows

constexpr std::string_view kRowNames[] = {"tokens", "seqs", "selected"};
constexpr std::string_view kStageNames[] = {"rows", "sequences", "heads"};
constexpr std::string_view kLayoutNames[] = {"dense", "panels", "padded"};
constexpr std::string_view kDTypeNames[] = {
#define ENCAST_DTYPE(name, bytes) #name,
#include "base/dtype.inc"
#undef ENCAST_DTYPE
};

// One line, cut at single spaces.
class Line {
 public:
  Line(std::string_view text, size_t number) : rest_(text), number_(number) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw PlanError("plan line " + std::to_string(number_) + ": " + what);
  }
  bool done() const { return rest_.empty(); }

  std::string_view word(const char* what) {
    if (rest_.empty()) fail(std::string("ends where ") + what + " should stand");
    const size_t space = rest_.find(' ');
    const std::string_view found = rest_.substr(0, space);
    rest_ = space == std::string_view::npos ? std::string_view() : rest_.substr(space + 1);
    if (space != std::string_view::npos && rest_.empty()) fail("ends in a space");
    if (found.empty()) fail(std::string("has an empty word where ") + what + " should stand");
    return found;
  }
  void end() const {
    if (!rest_.empty()) fail("has '" + std::string(rest_.substr(0, 40)) + "' after its end");
  }

  int64_t integer(std::string_view text, const char* what, int64_t low, int64_t high) const {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
      fail(std::string(what) + " is '" + std::string(text.substr(0, 40)) + "', not an integer from " +
           std::to_string(low) + " to " + std::to_string(high));
    }
    return value;
  }
  float real(std::string_view text, const char* what) const {
    // strtof, since libc++ before 20 has no from_chars for floating point; the copy ends the string. In a
    // locale of its own: the program's may write 0,5.
    static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
    char copy[64] = {};
    if (text.empty() || text.size() >= sizeof(copy)) fail(std::string(what) + " is no number");
    std::memcpy(copy, text.data(), text.size());
    char* end = nullptr;
    const float value = strtof_l(copy, &end, plain);
    if (end != copy + text.size() || !std::isfinite(value)) fail(std::string(what) + " is no finite number");
    return value;
  }
  template <class E, size_t N>
  E choice(std::string_view text, const char* what, const std::string_view (&names)[N]) const {
    std::string accepted;
    for (size_t index = 0; index < N; ++index) {
      if (text == names[index]) return static_cast<E>(index);
      accepted += (index == 0 ? "" : ", ") + std::string(names[index]);
    }
    fail(std::string(what) + " is '" + std::string(text.substr(0, 40)) + "'; accepted: " + accepted);
  }
  // An id of a declared item: the prefix and a number below count.
  int id(std::string_view text, char prefix, size_t count, const char* what) const {
    if (text.empty() || text[0] != prefix || count == 0) {
      fail(std::string(what) + " is '" + std::string(text.substr(0, 40)) + "', not a declared " + prefix +
           "N");
    }
    return static_cast<int>(integer(text.substr(1), what, 0, static_cast<int64_t>(count) - 1));
  }
  std::string_view at() {
    const std::string_view text = word("@offset");
    if (text[0] != '@') fail("has '" + std::string(text.substr(0, 40)) + "' where @offset should stand");
    return text.substr(1);
  }
  std::string_view value_of(std::string_view key) {
    const std::string_view text = word(std::string(key).c_str());
    const size_t equals = text.find('=');
    if (text.substr(0, equals) != key || equals == std::string_view::npos) {
      fail("has '" + std::string(text.substr(0, 40)) + "' where " + std::string(key) + "= should stand");
    }
    return text.substr(equals + 1);
  }

 private:
  std::string_view rest_;
  size_t number_;
};

void parse_limits(Line& line, Plan& plan) {
  plan.vocab = line.integer(line.value_of("vocab"), "vocab", 1, kMaxRows - 1);
  plan.types = line.integer(line.value_of("types"), "types", 0, kMaxCols);
  plan.max_len = line.integer(line.value_of("max_len"), "max_len", 1, kMaxTokens);
  plan.chunk_tokens = line.integer(line.value_of("chunk_tokens"), "chunk_tokens", plan.max_len, kMaxTokens);
  plan.arena = line.integer(line.value_of("arena"), "arena", 0, kMaxBytes);
  plan.block_rows =
      line.integer(line.value_of("block_rows"), "block_rows", ValueDecl::kBlockUnit, kMaxTokens);
  plan.stream_rows = line.integer(line.value_of("stream_rows"), "stream_rows", 1, kMaxTokens);
  plan.head_tokens = line.integer(line.value_of("head_tokens"), "head_tokens", 0, kMaxTokens);
  plan.block = line.integer(line.value_of("block"), "block", 0, kMaxBlockBytes);
  plan.exact = line.integer(line.value_of("exact"), "exact", 0, 1) == 1;
}

void parse_weight(Line& line, Plan& plan) {
  WeightDecl weight;
  const std::string_view id = line.word("a weight id");
  if (id != "w" + std::to_string(plan.weights.size())) line.fail("weight ids must count up from w0");
  weight.dtype = line.choice<DType>(line.word("a dtype"), "dtype", kDTypeNames);
  weight.layout = line.choice<WeightLayout>(line.word("a layout"), "layout", kLayoutNames);
  weight.rows = line.integer(line.word("rows"), "rows", 1, kMaxRows);
  weight.cols = line.integer(line.word("cols"), "cols", 1, kMaxCols);
  weight.offset = static_cast<uint64_t>(line.integer(line.at(), "offset", 0, kMaxBytes));
  if (weight.dtype == DType::q8) line.fail("a weight cannot be q8");
  plan.weights.push_back(weight);
}

void parse_value(Line& line, Plan& plan) {
  ValueDecl value;
  const std::string_view id = line.word("a value id");
  if (id != "v" + std::to_string(plan.values.size())) line.fail("value ids must count up from v0");
  value.dtype = line.choice<DType>(line.word("a dtype"), "dtype", kDTypeNames);
  value.rows = line.choice<Rows>(line.word("a row symbol"), "row symbol", kRowNames);
  value.cols = line.integer(line.word("cols"), "cols", 1, kMaxCols);
  std::string_view at = line.at();
  value.in_block = at.starts_with('+');
  if (value.in_block) at.remove_prefix(1);
  value.offset =
      at == "-" && !value.in_block ? ValueDecl::kCallerMemory : line.integer(at, "offset", 0, kMaxBytes);
  if (value.dtype != DType::f32 && value.dtype != DType::bf16 && value.dtype != DType::q8) {
    line.fail("a value is f32, bf16 or q8");
  }
  if (value.offset == ValueDecl::kCallerMemory && value.dtype != DType::f32) {
    line.fail("a value in the caller's memory is f32");
  }
  plan.values.push_back(value);
}

// Reads the text of a key into the member of the step that it stands for.
struct KeyReader {
  const Line& line;
  const Plan& plan;
  StepDecl& step;
  std::string_view key, text;

  void operator()(ValueKey value) const {
    step.*value.id = line.id(text, 'v', plan.values.size(), "operand");
  }
  void operator()(WeightKey weight) const {
    step.*weight.id = line.id(text, 'w', plan.weights.size(), "operand");
  }
  void operator()(IntegerKey number) const {
    step.*number.member = static_cast<int32_t>(line.integer(text, key.data(), number.low, number.high));
  }
  void operator()(float StepDecl::*real) const { step.*real = line.real(text, key.data()); }
  void operator()(bool StepDecl::*flag) const { step.*flag = line.integer(text, key.data(), 0, 1) == 1; }
  void operator()(std::string StepDecl::*word) const { step.*word = text; }
  void operator()(Activation StepDecl::*act) const {
    step.*act = line.choice<Activation>(text, key.data(), kActivationNames);
  }
  void operator()(Pooling StepDecl::*mode) const {
    step.*mode = line.choice<Pooling>(text, key.data(), kPoolingNames);
  }
};

void parse_stage(Line& line, Plan& plan) {
  const auto kind = line.choice<StageKind>(line.word("a kind of stage"), "kind of stage", kStageNames);
  if (!plan.stages.empty() && plan.stages.back().begin == plan.steps.size()) {
    line.fail("the stage before this one has no steps");
  }
  plan.stages.push_back({kind, plan.steps.size(), plan.steps.size()});
}

void parse_step(Line& line, Plan& plan) {
  StepDecl step;
  if (plan.stages.empty()) line.fail("is a step before the first stage");
  const std::string_view kind = line.word("a kind of step");
  const std::optional<StepKind> found_kind = step_kind(kind);
  if (!found_kind) line.fail("no kind of step is called '" + std::string(kind.substr(0, 40)) + "'");
  step.kind = *found_kind;
  std::string seen = " ";
  while (!line.done()) {
    const std::string_view word = line.word("key=value");
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos)
      line.fail("'" + std::string(word.substr(0, 40)) + "' is no key=value");
    const std::string_view key = word.substr(0, equals);
    const StepKey* found = key == "name" ? &kNameKey : nullptr;
    for_each_key(step.kind, [&](const StepKey& known, bool) { found = known.name == key ? &known : found; });
    if (found == nullptr) {
      line.fail("'" + std::string(key.substr(0, 40)) + "' is no key of " + step_name(step.kind) +
                ", which has: " + step_keys(step.kind));
    }
    const std::string mark = std::string(key) + " ";
    if (seen.find(" " + mark) != std::string::npos) line.fail("has " + std::string(key) + " twice");
    seen += mark;
    std::visit(KeyReader{line, plan, step, found->name, word.substr(equals + 1)}, found->member);
  }
  for_each_key(step.kind, [&](const StepKey& key, bool optional) {
    if (!optional && seen.find(" " + std::string(key.name) + " ") == std::string::npos) {
      line.fail(std::string(step_name(step.kind)) + " lacks " + std::string(key.name) + "=");
    }
  });
  plan.steps.push_back(std::move(step));
  plan.stages.back().end = plan.steps.size();
}

void parse_output(Line& line, Plan& plan) {
  OutputDecl output;
  output.name = line.word("a name");
  output.value = line.id(line.word("a value id"), 'v', plan.values.size(), "output");
  for (const OutputDecl& other : plan.outputs) {
    if (other.name == output.name) line.fail("output " + output.name + " is declared twice");
  }
  if (plan.outputs.size() == kMaxOutputs) line.fail("is one output too many");
  plan.outputs.push_back(std::move(output));
}

}  // namespace

const char* rows_name(Rows rows) { return kRowNames[static_cast<size_t>(rows)].data(); }
const char* layout_name(WeightLayout layout) { return kLayoutNames[static_cast<size_t>(layout)].data(); }
const char* stage_name(StageKind kind) { return kStageNames[static_cast<size_t>(kind)].data(); }

Plan parse_plan(std::string_view text) {
  if (text.size() > kMaxText)
    throw PlanError("the plan has " + std::to_string(text.size()) + " bytes; too many");
  Plan plan;
  size_t number = 0;
  bool limits = false;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    if (newline == std::string_view::npos)
      throw PlanError("the plan does not end in a newline: it was truncated");
    Line line(text.substr(0, newline), ++number);
    text.remove_prefix(newline + 1);
    const std::string_view word = line.word("a declaration");
    if (number == 1) {
      if (word != "encast-plan" || line.word("a version") != "1") {
        line.fail("this is no plan of version 1; open the artifact again to make a new one");
      }
    } else if (word == "limits" && !limits) {
      parse_limits(line, plan);
      limits = true;
    } else if (word == "weight") {
      parse_weight(line, plan);
    } else if (word == "value") {
      parse_value(line, plan);
    } else if (word == "stage") {
      parse_stage(line, plan);
    } else if (word == "step") {
      parse_step(line, plan);
    } else if (word == "output") {
      parse_output(line, plan);
    } else {
      line.fail("begins with '" + std::string(word.substr(0, 40)) +
                "'; accepted: one limits, then weight, value, stage, step, output");
    }
    line.end();
    if (number > kMaxLines) throw PlanError("the plan has too many lines");
  }
  if (!limits) throw PlanError("the plan has no limits line");
  if (!plan.stages.empty() && plan.stages.back().begin == plan.stages.back().end) {
    throw PlanError("the last stage of the plan has no steps");
  }
  return plan;
}

Plan Plan::parse(std::string_view text) {
  Plan plan = parse_plan(text);
  validate_plan(plan);
  return plan;
}

}  // namespace encast
