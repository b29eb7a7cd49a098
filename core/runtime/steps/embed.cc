#include <algorithm>

#include "kernels/embed/embed.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_embed(StepCheck& check, const StepDecl& step) {
  const auto first = std::ranges::find(check.plan().steps, StepKind::embed, &StepDecl::kind);
  check.need(&*first == &step, "is a second embed; positions are counted for one");
  const WeightDecl& word = check.weight(step.word, DType::f32, WeightLayout::dense);
  check.need(word.rows >= check.plan().vocab, "has fewer word rows than the vocabulary");
  if (step.position >= 0) {
    const WeightDecl& position = check.weight(step.position, DType::f32, WeightLayout::dense);
    check.need(position.cols == word.cols, "has tables of unlike widths");
    check.need(position.rows >= check.plan().max_len + step.offset, "has too few positions for max_len");
    check.need(step.skip < 0 || step.offset >= 1, "skips a token, which needs an offset of at least 1");
  }
  if (step.token_type >= 0) {
    const WeightDecl& types = check.weight(step.token_type, DType::f32, WeightLayout::dense);
    check.need(types.cols == word.cols, "has tables of unlike widths");
    check.need(types.rows >= check.plan().types && check.plan().types >= 1,
               "has fewer token types than the limits say");
  }
  check.need((step.gamma < 0) == (step.beta < 0), "has gamma or beta alone");
  if (step.gamma >= 0) check.norm_vectors(step, word.cols);
  check.write_f32(step.out, Rows::tokens, word.cols);
  if (step.also >= 0) check.write_narrow(step.also, Rows::tokens, word.cols);
}

class EmbedStep final : public RowStep<EmbedFn> {
 public:
  EmbedStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "embed_rows"), form_(binder.narrow_form(decl.also, decl)) {}

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
    args.narrow = narrow_out(share, decl_.also, form_);
    run_rows(args, share);
  }

 private:
  const NarrowOut form_;
};

}  // namespace

const StepType step_types::embed = {
    "word gamma? beta? position? token_type? eps offset skip out also? zero_point? q8_scale? q8_zero?",
    &check_embed, &bind_as<EmbedStep>};

}  // namespace encast
