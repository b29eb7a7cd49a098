"""Observes what products read while the f32 model reads some texts, so that ranges can be fixed before it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.errors import CheckpointError, InputError
from encast.importers import Checkpoint, open_checkpoint
from encast.ir import Graph
from encast.ir.ops import COARSE_ACTIVATIONS
from encast.passes import optimise
from encast.passes.move_outliers import move_outliers
from encast.quant.calibration import Calibration, Observed
from encast.quant.spec import QuantSpec
from encast.tasks.embed_tokens import KINDS, token_rows
from encast.tasks.texts import Text, check_texts_or_pairs
from encast.tasks.tokenize import Tokenizer

__all__ = ["calibrate"]

_BATCH_TOKENS = 1024


def calibrate(
    source: str | os.PathLike[str],
    texts: Sequence[Text],
    *,
    task: str | None = None,
    quant: QuantSpec | None = None,
    adapter: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Runs the checkpoint ``source`` (a folder or a hub id) over ``texts`` and notes what its products read.

    ``texts``: some hundred of the kind that the model will read; pairs (two texts) where it reads pairs. A pair for a
    sentence-embedding checkpoint counts as two texts, and its default prompt goes before each. ``task``, ``quant``
    and ``adapter`` are those of the compilation that the calibration is for; ``quant`` says whether outliers are moved
    first, which takes a second run. The NumPy reference computes. ``progress(done, total)`` is called with tokens.

    Raises ``InputError`` for texts or a ``task`` that cannot be used, ``CheckpointError`` and ``UnsupportedModelError``
    as ``compile`` does.
    """
    spec = quant or QuantSpec(activations="static")
    rows = check_texts_or_pairs(texts)
    if not rows:
        raise InputError("texts is empty; calibration needs some hundred texts of the kind that the model will read")
    checkpoint = open_checkpoint(source, adapter=adapter)
    graph, _ = optimise(build_graph(checkpoint, task), QuantSpec("f32"))
    batches = list(_batches(checkpoint, graph, rows))
    total = sum(batch.tokens for batch in batches)
    if spec.move_outliers is None:
        return Calibration(_observe(graph, batches, lambda done: progress(done, total)), total)
    before = _observe(graph, batches, lambda done: progress(done, 2 * total))
    largest = {name: seen.largest() for name, seen in before.items()}
    move_outliers(graph, spec, largest)
    after = _observe(graph, batches, lambda done: progress(total + done, 2 * total))
    return Calibration(after, total, spec.move_outliers, largest)


def _batches(checkpoint: Checkpoint, graph: Graph, rows: Iterable[Text]) -> Iterator[Batch]:
    """The texts as the engine would tokenise them, some at a time; for embeddings of tokens each as a query and as a
    document.
    """
    files, modules = checkpoint.tokenizer, checkpoint.modules
    tokenizer = Tokenizer(
        files.json,
        max_length=graph.meta.longest_text(files.max_length),
        truncation_side=files.truncation_side,
        mask_token=files.special_tokens.get("mask"),
    )
    prompt = "" if modules is None else (modules.prompts or {}).get(modules.default_prompt_name or "", "")
    if graph.meta.can("embed", "embed_sparse", "embed_tokens"):
        rows = [text for row in rows for text in ([row] if isinstance(row, str) else row)]
    prompted = [prompt + row if isinstance(row, str) else row for row in rows]
    read: list[tuple[list[int], list[int]]]
    if graph.meta.task == "embed_tokens" and (form := checkpoint.token_form) is not None:
        texts = [row for row in prompted if isinstance(row, str)]
        read = [(row, [0] * len(row)) for kind in KINDS for row in token_rows(tokenizer, form, kind, texts)]
    else:
        read = [(encoding.ids, encoding.type_ids) for encoding in tokenizer.encode(prompted)]
    ids: list[list[int]] = []
    types: list[list[int]] = []
    tokens = 0
    for row_ids, row_types in read:
        ids.append(row_ids)
        types.append(row_types if graph.meta.type_vocab > 1 else [0] * len(row_ids))
        tokens += len(row_ids)
        if tokens >= _BATCH_TOKENS:
            yield Batch.of(ids, types)
            ids, types, tokens = [], [], 0
    if ids:
        yield Batch.of(ids, types)


def _observe(graph: Graph, batches: Sequence[Batch], progress: Callable[[int], None]) -> dict[str, Observed]:
    """What every value held that a linear reads."""
    graph = graph.copy()
    for node in graph.nodes:
        # As in an int8 graph, whose products end in the coarse form; and the erf of NumPy float64 is slow.
        if node.op == "linear":
            node.attrs["activation"] = COARSE_ACTIVATIONS.get(node.attrs["activation"], node.attrs["activation"])
    names = dict.fromkeys(node.inputs[0] for node in graph.nodes if node.op == "linear")
    seen = {name: Observed.of(int(graph.type_of(name).shape[1])) for name in names}

    def see(name: str, rows: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        if not np.isfinite(rows).all():
            raise CheckpointError(f"{name!r} is not finite for some of the texts; the weights are no trained model's")
        seen[name].add(rows)

    reference = Reference(graph)
    done = 0
    for batch in batches:
        # Where rows are selected (masked words), any token may be.
        select = np.arange(batch.tokens, dtype=np.int32)
        reference.watch(names, batch, select, see)
        done += batch.tokens
        progress(done)
    return seen
