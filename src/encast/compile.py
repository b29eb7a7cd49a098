"""The whole flow, from a checkpoint to an artifact. Start reading here; every line is a stage of ARCHITECTURE.md."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import encast._core as _core
import encast.artifact as artifact
from encast.archs import TASKS, build_graph, m3_of
from encast.errors import CheckpointError, InputError, ResourceError, need_modules
from encast.importers import NO_ADAPTER, Checkpoint, checkpoint_name, open_checkpoint
from encast.ir import Graph
from encast.passes import SPARSE, FusionReport, count_fixed, optimise, stored_ranges
from encast.quant import Calibration, QuantSpec

if TYPE_CHECKING:
    from encast.verify import Original, Runtime

__all__ = ["check_sparse", "compile"]

Progress = Callable[[str, int, int], None]


def compile(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "int8",
    task: str | None = None,
    quant: QuantSpec | None = None,
    calibration: Calibration | None = None,
    strict: bool = False,
    exact: bool = False,
    sparse: str = "never",
    verify: bool | None = None,
    adapter: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compiles the checkpoint ``source``, as ``open_checkpoint`` takes it, and returns the path of the artifact.

    ``out``: the artifact's folder; by default the checkpoint's name with ``.encast`` in the working directory.
    ``dtype``: of weights and activations in products: ``int8``, ``bf16`` or ``f32``. ``quant``: which products
    keep a wider one; its dtype must be ``dtype``. ``task``: what the model is for (``archs.TASKS``); by default
    what the checkpoint says. ``strict``: a fusion that the config promises and that was not made is a
    ``StrictError``, and so is a product of a layer that is to be sparse and has no blocks of zeros. ``sparse``:
    whether int8 products leave out blocks of zeros (four outputs that share an input), with the same answers:
    ``never``, ``always``, or ``auto``, where so few of a weight's blocks are left that it is faster at this machine's
    ISA level (``ENCAST_ISA`` names another one). ``exact``: exp, erf and tanh by
    libm instead of polynomials. ``calibration``: what ``encast.calibrate`` returned for this checkpoint and ``quant``,
    if that asks for static activations or moved outliers; else None, since scales of activations are found at run time,
    a row at a time. A checkpoint that is quantised already may fix the ranges of activations: where it does for every
    int8 product they are taken without a ``quant``, and with one that asks for static activations.
    ``verify``: whether ONNX Runtime answers random tokens by the ONNX file, or TensorFlow by the SavedModel, as an f32
    artifact does; the difference goes on the card, with that between f32 and ``dtype``, and a file of which the answers
    differ is not compiled. By default
    it is done where the checkpoint is one of these and its runtime is installed, and where that cannot run it the card
    says why. A SavedModel's graph is a program that then runs.
    ``adapter``: of a checkpoint that holds adapters (jina-embeddings-v3), the one that goes into the weights; its text
    becomes the default prompt. ``none``: the weights as they are.
    ``progress(stage, done, total)`` is called as the work goes on.

    Raises ``InputError`` for bad options, ``CheckpointError`` or ``UnsupportedModelError`` for a checkpoint that
    cannot be used, and ``ResourceError`` when the artifact cannot be written. ``out`` then stays as it was.
    """
    if task is not None and task not in TASKS:
        raise InputError(f"task is {task!r}; one of {', '.join(TASKS)} is needed")
    spec = _spec(dtype, quant)
    check_sparse(sparse, spec)
    report_progress = progress or (lambda stage, done, total: None)
    target = artifact.check_target(out if out is not None else f"{checkpoint_name(source)}.encast")
    report_progress("import", 0, 1)
    checkpoint = open_checkpoint(source, adapter=adapter)
    runtime = _runtime(checkpoint, verify)
    report_progress("build", 0, 1)
    graph = build_graph(checkpoint, task)
    check = None
    if runtime is not None:
        check = partial(_verified, checkpoint, graph, dtype, runtime, asked=bool(verify))
    _check_tokenizer(checkpoint, graph)
    _check_lengths(checkpoint, graph)
    _check_prompt(checkpoint, graph)
    report_progress("optimise", 0, 1)
    fixed, stored = count_fixed(graph, spec), False
    if calibration is None and (quant is None or spec.activations == "static"):
        spec, calibration = stored_ranges(graph, spec) or (spec, None)
        stored = calibration is not None
    isa = _core.isa_best() if sparse == "auto" else ""
    graph, fusions = optimise(graph, spec, calibration=calibration, strict=strict, exact=exact, sparse=sparse, isa=isa)
    card = _card(checkpoint, graph, spec, fusions, sparse)
    if checkpoint.export is not None and checkpoint.export.quantised:
        card["quantised"] = {
            "rows": checkpoint.export.quantised,
            "ranges": {"stored": fixed[0], "values": fixed[1], "used": stored},
            "left_out": checkpoint.export.elsewhere,
            "kept": {name: list(rows) for name, rows in fusions.kept.items()},
        }
    if sparse == "auto":
        card["sparse_for"] = isa
    return artifact.write(
        target,
        graph,
        checkpoint.tokenizer.json,
        card,
        progress=lambda done, total: report_progress("store", done, total),
        check=check,
    )


def _runtime(checkpoint: Checkpoint, verify: bool | None) -> Runtime | None:
    """What verifies the artifact, if anything does."""
    if verify is False:
        return None
    if not checkpoint.onnx and checkpoint.saved_model is None:
        if verify:
            raise InputError(
                f"{checkpoint.source}: verify compares an ONNX file with ONNX Runtime and a SavedModel with "
                "TensorFlow, and this is neither: it has no graph to run; leave it out"
            )
        return None
    import encast.verify as by  # here: others need nothing that runs a model

    runtime = by.ONNX_RUNTIME if checkpoint.onnx else by.TENSORFLOW
    if verify:
        need_modules(runtime.extra, runtime.module)
    return runtime if runtime.installed() else None


def _verified(
    checkpoint: Checkpoint, plain: Graph, dtype: str, runtime: Runtime, made: Path, *, asked: bool
) -> dict[str, dict[str, object]]:
    """What the card of the artifact ``made`` says of the comparison. ``plain``: the graph that it was made of."""
    import encast.verify as by

    try:
        original = _original(checkpoint)
        if runtime.programs and not asked:
            raise by.NotComparedError(
                f"{original.label}: a graph of {runtime.name} is a program of its maker, which runs only when "
                "asked: give --verify (verify=True) where you trust it"
            )
        if original.arithmetic == "fixed":
            return {"verified": by.verify(made, original)}  # its ranges are the artifact's too, where those are static
        with tempfile.TemporaryDirectory(dir=made) as folder:

            def f32(name: str, graph: Graph) -> Path | None:
                """None where there is no room for it."""
                spec = QuantSpec("f32")
                graph, fusions = optimise(graph, spec)
                card = _card(checkpoint, graph, spec, fusions, "never")
                with contextlib.suppress(ResourceError):
                    return artifact.write(Path(folder, name), graph, checkpoint.tokenizer.json, card)
                return None

            wide = None if dtype == "f32" else f32("f32", plain)
            if wide is None and dtype != "f32":
                raise by.NotComparedError(
                    f"{original.label}: there is no room in {made.parent} for the f32 artifact that it is compared "
                    "with; make room, or compile without verify"
                )
            return {"verified": by.verify(made, original, wide, lambda: f32("shaken", by.shaken(plain)))}
    except by.NotComparedError as error:
        if asked:
            raise
        return {"verified": {"skipped": str(error)}}


def _original(checkpoint: Checkpoint) -> Original:
    """Raises ``NotComparedError`` for a SavedModel that takes no token ids, or more than an encoder does."""
    import encast.verify as by

    saved = checkpoint.saved_model
    if saved is None:
        export = checkpoint.export
        assert export is not None
        takes = by.Takes(dict(export.inputs.names), export.inputs.sequences, export.inputs.positions)
        return by.Original(by.ONNX_RUNTIME, checkpoint.path / checkpoint.onnx, takes, export.arithmetic)
    if not saved.signature:
        raise by.NotComparedError(
            f"{checkpoint.source}: no signature takes input_ids (there is {saved.offered}); export the model with "
            "build_raw_serving_input_receiver_fn, or compile without verify"
        )
    if saved.unknown:
        raise by.NotComparedError(
            f"{checkpoint.source}: the signature {saved.signature} takes {', '.join(saved.unknown)}, of which nobody "
            "says here what to give; export the model without, or compile without verify"
        )
    names = {**saved.inputs.names, **dict.fromkeys(saved.unused, by.UNUSED)}
    takes = by.Takes(names, saved.inputs.sequences, saved.inputs.positions, saved.tags, saved.signature)
    return by.Original(by.TENSORFLOW, saved.folder, takes, saved.arithmetic)


def _spec(dtype: str, quant: QuantSpec | None) -> QuantSpec:
    if quant is not None and quant.dtype != dtype:
        raise InputError(f"dtype is {dtype!r} and quant.dtype is {quant.dtype!r}; give both alike")
    return quant if quant is not None else QuantSpec(dtype)


def check_sparse(sparse: str, spec: QuantSpec) -> None:
    """Raises ``InputError`` unless products of ``spec`` can be ``sparse``."""
    if sparse not in SPARSE:
        raise InputError(f"sparse is {sparse!r}; one of {', '.join(SPARSE)} is needed")
    if sparse != "never" and spec.dtype != "int8":
        raise InputError(
            f"sparse is {sparse!r} and dtype {spec.dtype!r}; sparse products are int8: leave one of them out"
        )


def _check_tokenizer(checkpoint: Checkpoint, graph: Graph) -> None:
    tokenizer = checkpoint.tokenizer
    longest = graph.meta.longest_text(tokenizer.max_length)
    late = None if checkpoint.modules is None else checkpoint.modules.late
    if late is not None and longest <= tokenizer.special_count:
        raise CheckpointError(
            f"{checkpoint.path}: queries and documents may have {longest} tokens, of which {tokenizer.special_count} "
            "are kept for special ones, which leaves none for the text; correct query_length and document_length in "
            "config_sentence_transformers.json (query_maxlen and doc_maxlen in artifact.metadata)"
        )
    if longest <= tokenizer.special_count:
        raise CheckpointError(
            f"{checkpoint.path}: texts may have {longest} tokens, and a pair of texts gets {tokenizer.special_count} "
            "special ones, which leaves none for the texts; correct max_position_embeddings in "
            f"{checkpoint.config_file}, "
            "model_max_length in tokenizer_config.json or max_seq_length in sentence_bert_config.json"
        )
    largest, rows = tokenizer.vocab_size - 1, graph.meta.vocab
    if largest >= rows:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer makes ids up to {largest}, the word embedding has {rows} rows: "
            "tokenizer and weights are not of the same model, or its embedding was not resized after tokens were added"
        )


def _check_prompt(checkpoint: Checkpoint, graph: Graph) -> None:
    if checkpoint.modules is None and checkpoint.adapter not in (None, NO_ADAPTER) and graph.meta.can("embed"):
        raise CheckpointError(
            f"{checkpoint.path}: modules.json is missing, which says how embeddings are pooled and carries the text "
            f"that goes before each input with adapter {checkpoint.adapter!r}; take the whole "
            "checkpoint, or task features"
        )


def _check_lengths(checkpoint: Checkpoint, graph: Graph) -> None:
    form = checkpoint.token_form if graph.meta.can("embed_tokens") else None
    for kind, length in () if form is None else (("queries", form.query_length), ("documents", form.document_length)):
        if length is not None and length > graph.meta.max_len:
            raise CheckpointError(
                f"{checkpoint.path}: {kind} may have {length} tokens, and the positions of the model end at "
                f"{graph.meta.max_len}; correct the lengths in the checkpoint"
            )


def _card(
    checkpoint: Checkpoint, graph: Graph, spec: QuantSpec, fusions: FusionReport, sparse: str
) -> dict[str, object]:
    tokenizer, modules = checkpoint.tokenizer, checkpoint.modules
    form = checkpoint.token_form if graph.meta.can("embed_tokens") else None
    weighs = graph.meta.can("embed_sparse") and m3_of(checkpoint) is not None
    return {
        "source": checkpoint.provenance,
        "arch": graph.meta.arch,
        "task": graph.meta.task,
        "dtype": spec.dtype,
        "quant": spec.to_json(),
        "math": graph.meta.math,
        "sparse": sparse,
        "fusions": fusions.to_json(),
        "tokenizer": {
            "max_length": tokenizer.max_length,
            "truncation_side": tokenizer.truncation_side,
            "mask_token": tokenizer.special_tokens.get("mask"),
        },
        "prompts": None if modules is None else dict(modules.prompts or {}),
        "default_prompt": None if modules is None else modules.default_prompt_name,
        "splade": None
        if modules is None or modules.splade is None
        else asdict(modules.splade.within(graph.meta.vocab)),
        "token_form": None if form is None else form.to_json(),
        "unweighted": checkpoint.unweighted if weighs else None,
    }
