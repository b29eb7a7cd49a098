"""Attention of steps in bf16: in f32 where torch has a fused kernel for it, as it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

import torch.nn.functional as F  # noqa: N812, its usual name
from small_rows import classes

from encast.compress import attention
from encast.compress.pipeline import compress
from encast.compress.recipe import parse_recipe
from encast.data.datasets import open_dataset

MASKS = {
    "none": None,
    "bool": torch.arange(7) < torch.tensor([7, 4, 1])[:, None, None, None],
    "numbers": torch.linspace(-3, 0, 7).to(torch.bfloat16).expand(3, 1, 7, 7),
}


def attend(dtype: Any, context: Any, **options: Any) -> list[Any]:
    """The output and the gradients of queries, keys and values, whose numbers are those of bf16."""
    torch.manual_seed(0)
    given = [torch.randn(3, 2, 7, 8).to(torch.bfloat16).to(dtype).requires_grad_() for _ in range(3)]
    with context, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = F.scaled_dot_product_attention(*given, **options)
    # Of numbers that bf16 has, so that both gradients begin alike.
    (out.float() * torch.arange(8.0)).sum().backward()
    return [out, *(one.grad for one in given)]


@pytest.mark.parametrize("mask", MASKS)
def test_output_and_gradients_are_those_of_f32(mask: str) -> None:
    given, scale = MASKS[mask], 0.25
    wide = given.float() if mask == "numbers" else given
    wanted = attend(torch.float32, torch.autocast("cpu", enabled=False), attn_mask=wide, scale=scale)
    for one, other in zip(
        attend(torch.bfloat16, attention.AttentionInF32(), attn_mask=given, scale=scale), wanted, strict=True
    ):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.to(torch.bfloat16))


def test_attention_with_dropout_stays_as_it_is() -> None:
    bare = attend(torch.bfloat16, torch.enable_grad(), dropout_p=0.5)
    for one, other in zip(attend(torch.bfloat16, attention.AttentionInF32(), dropout_p=0.5), bare, strict=True):
        assert torch.equal(one, other)


def test_all_arguments_by_position_and_queries_in_f32() -> None:
    """EuroBERT's rotary positions make them wide."""
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 2, 7, 8, generator=random) for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*given, None, 0.0, True)
    with torch.autocast("cpu", dtype=torch.bfloat16), attention.AttentionInF32():
        found = F.scaled_dot_product_attention(*given, None, 0.0, True)
    assert torch.equal(found, wanted.to(torch.bfloat16))


@pytest.mark.parametrize(("precision", "calls"), [("f32", False), ("bf16", True)])
def test_training_in_bf16_computes_attention_in_f32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: Path, write_rows: Callable[..., Path], precision: str,
    calls: bool,
) -> None:  # fmt: skip
    seen = []
    real = attention._attention

    def attend(query: Any, *others: Any, **options: Any) -> Any:
        seen.append(query.dtype)
        return real(query, *others, **options)

    monkeypatch.setattr(attention, "_attention", attend)
    data = open_dataset(write_rows("data", classes(40, 1), classes(10, 2)) / "train.jsonl")
    recipe = f"stages: [{{fine-tune: {{max-steps: 2, batch-size: 8, precision: {precision}, dropout: 0}}}}]"
    compress(
        encoder, tmp_path / "out", task="classify", recipe=parse_recipe(recipe, "recipe"), device="cpu", threads=1,
        train=data, dev=data,
    )  # fmt: skip
    assert bool(seen) == calls
    assert all(one == torch.bfloat16 for one in seen)
