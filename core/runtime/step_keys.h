#pragma once
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "kernels/sparse/sparse.h"
#include "runtime/plan.h"

// The keys that steps have: what each is in the text of a plan, and where it stands in a StepDecl. One list
// for who reads plans and who shows them.
namespace encast {

struct ValueKey {
  int StepDecl::*id;
};
struct WeightKey {
  int StepDecl::*id;
};
struct IntegerKey {
  int32_t StepDecl::*member;
  int64_t low, high;
};

struct StepKey {
  std::string_view name;
  std::variant<ValueKey, WeightKey, IntegerKey, float StepDecl::*, bool StepDecl::*, std::string StepDecl::*,
               Activation StepDecl::*, Pooling StepDecl::*>
      member;
};

inline constexpr std::string_view kActivationNames[] = {
#define ENCAST_ACTIVATION(name) #name,
#include "base/activation.inc"
#undef ENCAST_ACTIVATION
};
inline constexpr std::string_view kPoolingNames[] = {
#define ENCAST_POOLING(name) #name,
#include "kernels/reduce/pooling.inc"
#undef ENCAST_POOLING
};

constexpr int64_t kMaxRows = int64_t{1} << 31;
constexpr int64_t kMaxCols = int64_t{1} << 24;

inline constexpr StepKey kStepKeys[] = {
    {"x", ValueKey{&StepDecl::x}},
    {"other", ValueKey{&StepDecl::other}},
    {"out", ValueKey{&StepDecl::out}},
    {"also", ValueKey{&StepDecl::also}},
    {"word", WeightKey{&StepDecl::word}},
    {"position", WeightKey{&StepDecl::position}},
    {"token_type", WeightKey{&StepDecl::token_type}},
    {"gamma", WeightKey{&StepDecl::gamma}},
    {"beta", WeightKey{&StepDecl::beta}},
    {"table", WeightKey{&StepDecl::table}},
    {"w", WeightKey{&StepDecl::w}},
    {"columns", WeightKey{&StepDecl::columns}},
    {"starts", WeightKey{&StepDecl::starts}},
    {"dense", WeightKey{&StepDecl::dense}},
    {"dense_rows", IntegerKey{&StepDecl::dense_rows, 1, kTileRows - 1}},
    {"scale", WeightKey{&StepDecl::scale}},
    {"colsum", WeightKey{&StepDecl::colsum}},
    {"bias", WeightKey{&StepDecl::bias}},
    {"key_table", WeightKey{&StepDecl::key_table}},
    {"query_table", WeightKey{&StepDecl::query_table}},
    {"shared_tables", &StepDecl::shared_tables},
    {"heads", IntegerKey{&StepDecl::heads, 1, 1 << 16}},
    {"reach", IntegerKey{&StepDecl::reach, 1, kMaxRows - 1}},
    {"unseen", IntegerKey{&StepDecl::unseen, 0, kMaxRows - 1}},
    {"most_unseen", IntegerKey{&StepDecl::most_unseen, 1, kMaxRows - 1}},
    {"offset", IntegerKey{&StepDecl::offset, 0, 1 << 20}},
    {"skip", IntegerKey{&StepDecl::skip, -1, kMaxRows - 1}},
    {"column", IntegerKey{&StepDecl::column, 0, kMaxCols}},
    {"eps", &StepDecl::eps},
    {"factor", &StepDecl::factor},
    {"zero_point", &StepDecl::zero_point},
    {"q8_scale", &StepDecl::q8_scale},
    {"q8_zero", IntegerKey{&StepDecl::q8_zero, 0, 255}},
    {"coarse", &StepDecl::coarse},
    {"act", &StepDecl::act},
    {"mode", &StepDecl::mode},
    {"arithmetic", &StepDecl::arithmetic},
};

inline constexpr StepKey kNameKey = {"name", &StepDecl::name};  // of every kind of step

// Calls f(key, optional) for every key of a kind of step in the order of its form (StepType), but for the
// name.
template <class F>
void for_each_key(StepKind kind, F f) {
  std::string_view keys = step_keys(kind);
  while (!keys.empty()) {
    const size_t space = keys.find(' ');
    std::string_view name = keys.substr(0, space);
    keys = space == std::string_view::npos ? std::string_view() : keys.substr(space + 1);
    const bool optional = name.back() == '?';
    if (optional) name.remove_suffix(1);
    for (const StepKey& key : kStepKeys) {
      if (key.name == name) f(key, optional);
    }
  }
}

}  // namespace encast
