"""Pairs of texts without token types, for models that were trained without.

transformers gives a model what the tokenizer's ``model_input_names`` lists. Without ``token_type_ids`` every token has
type 0, whatever tokenizer.json says.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from encast.importers.tokenizer_parts import change_part, state_of, steps_of

__all__ = ["drop_token_types"]

_ALL = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]


def drop_token_types(tokenizer: Tokenizer) -> bool:
    """Gives both texts of a pair type 0; False where they have it already."""
    state = state_of(tokenizer.post_processor)
    steps = [_untyped(step) for step in steps_of(tokenizer, "post_processor")]
    if not any(step["type"] in ("TemplateProcessing", "RobertaProcessing") for step in steps):
        # Nothing puts the texts together, so that the library does, with types 0 and 1.
        steps = [*steps, {"type": "TemplateProcessing", "single": _ALL[:1], "pair": _ALL, "special_tokens": {}}]
    changed = steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}
    if changed == state:
        return False
    change_part(tokenizer, "post_processor", changed)
    return True


def _untyped(step: dict[str, Any]) -> dict[str, Any]:
    """A step with types 0. RoBERTa's has no others."""
    if step["type"] == "TemplateProcessing":
        return {**step, **{form: [_piece(*piece.items()) for piece in step[form]] for form in ("single", "pair")}}
    if step["type"] == "BertProcessing":
        first, last = (_piece(("SpecialToken", {"id": step[role][0]})) for role in ("cls", "sep"))
        special = {
            token: {"id": token, "ids": [index], "tokens": [token]} for token, index in (step["cls"], step["sep"])
        }
        single, pair = [first, _ALL[0], last], [first, _ALL[0], last, _ALL[1], last]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return step


def _piece(item: tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    kind, value = item
    return {kind: {**value, "type_id": 0}}
