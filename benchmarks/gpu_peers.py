"""encast beside PyTorch on one device, by turns, and what the device's matrix products reach.

PyTorch runs transformers' model of the same checkpoint, f16 with its fused attention and mean pooling in the model:
eagerly, and compiled by ``torch.compile`` for the very shape, with CUDA graphs. Its batches are padded to the longest
text. Both are given ids on the host and answer with f32 embeddings on the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch

__all__ = ["NO_TIME", "against_pytorch", "ceilings", "lines_of_peers"]

NO_TIME = "no time was left"
ROUNDS = 7
Call = Callable[[], Any]


def ceilings(kind: str, size: int) -> dict[str, float]:
    """TFLOP/s of a product of ``size`` cubed by cuBLAS, by dtype; what this PyTorch or device has not is absent."""
    from encast.backends.gpu.card import product_rates
    from encast.backends.gpu.device import choose_device

    return {dtype: rate / 1e12 for dtype, rate in product_rates(choose_device(kind, None), size).items()}


def operations(sizes: dict[str, Any], lengths: Any) -> float:
    """Multiplications and additions of a forward's products."""
    tokens, squares = float(np.sum(lengths)), float(np.square(lengths).sum())
    weights = 4 * sizes["hidden"] ** 2 + 2 * sizes["hidden"] * sizes["inner"]
    return float(2 * sizes["layers"] * (tokens * weights + 2 * squares * sizes["hidden"]))


def against_pytorch(
    kind: str,
    sizes: dict[str, Any],
    checkpoint: Path,
    opened: Any,
    batches: dict[str, Batch],
    seconds: float,
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """A row a shape: milliseconds a call of every runner, in rounds, and what is left out."""
    from encast.backends.gpu.runnable import GpuRunnable

    with ExitStack() as stack:
        ours = {}
        for dtype in ("f16", "f8"):
            gpu = GpuRunnable(opened.load_graph(), kind, dtype=dtype)
            ours[f"encast {dtype}"] = stack.enter_context(closing(gpu))
        for shape, batch in batches.items():
            lengths = np.diff(batch.cu_seqlens)
            row: dict[str, Any] = {"model": sizes["name"], "shape": shape, "texts": batch.seqs}
            row |= {"tokens": batch.tokens, "operations": operations(sizes, lengths), "left out": {}, "times": {}}
            row["card alone"] = {}
            if time.monotonic() > deadline:
                row["left out"]["all"] = NO_TIME
                yield row
                continue
            calls: dict[str, Call] = {
                name: lambda gpu=gpu, batch=batch: gpu.run("embedding", batch) for name, gpu in ours.items()
            }
            try:
                calls |= _pytorch(kind, checkpoint, batch, row["left out"])
                row["times"] = _rounds(calls, seconds)
                if kind == "cuda":
                    row["card alone"] = {name: _card_alone(gpu, batch) for name, gpu in ours.items()}
                row["right"] = _agree(calls, row)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            yield row


def _agree(calls: dict[str, Call], row: dict[str, Any]) -> bool:
    """Whether all are the same embeddings: cosines to the first of PyTorch, or to the first."""
    answers = {name: np.asarray(call(), np.float64) for name, call in calls.items()}
    reference = answers.get("PyTorch", next(iter(answers.values())))

    def cosine(one: Any) -> float:
        sizes = np.linalg.norm(one, axis=1) * np.linalg.norm(reference, axis=1)
        return float(((one * reference).sum(axis=1) / sizes).min())

    row["cosines"] = {name: cosine(one) for name, one in answers.items()}
    return all(found > (0.99 if "f8" in name else 0.999) for name, found in row["cosines"].items())


def _rounds(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a call, a number a round: every runner has its turn in every round."""
    counts = {}
    for name, call in calls.items():
        for _ in range(3):  # compiles kernels and records graphs
            call()
        begin = time.perf_counter()
        call()
        counts[name] = max(1, int(seconds / ROUNDS / (time.perf_counter() - begin)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(counts[name]):
                call()
            times[name].append(1000 * (time.perf_counter() - begin) / counts[name])
    return times


def _card_alone(gpu: Any, batch: Batch) -> float:
    """Milliseconds of the CUDA graph that ran this batch, without what the host does: the median of rounds of ten."""
    import torch

    from encast.backends.gpu.graphs import bucket_of

    bucket = bucket_of(batch)
    assert bucket is not None
    replay = gpu._graphs._made[("embedding", *bucket)][1]
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    return statistics.median(times)


def _pytorch(kind: str, checkpoint: Path, batch: Batch, left_out: dict[str, str]) -> dict[str, Call]:
    for what, backend in (("ONNX Runtime on CUDA", "onnxruntime-cuda-f16"), ("TensorRT", "tensorrt-cuda-f16")):
        left_out[what] = f"this script has no run of it; see `encast bench backend=encast-cuda-f16,{backend}`"
    if find_spec("transformers") is None:
        left_out["PyTorch"] = left_out["torch.compile"] = "transformers is not installed"
        return {}
    import torch
    from transformers import AutoModel

    on_card = kind == "cuda"
    device, dtype = ("cuda", torch.float16) if on_card else ("cpu", torch.float32)
    model = AutoModel.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    lengths = np.diff(batch.cu_seqlens)
    ids = torch.zeros(batch.seqs, int(lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (begin, length) in enumerate(zip(batch.cu_seqlens, lengths, strict=False)):
        ids[row, :length] = torch.from_numpy(batch.token_ids[begin : begin + length].astype(np.int64))
        mask[row, :length] = 1
    if on_card:
        ids, mask = ids.pin_memory(), mask.pin_memory()

    def embeddings(ids: Any, mask: Any) -> Any:
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(states.dtype)
        return (states * weights).sum(1).float() / weights.sum(1).float()

    def caller(run: Callable[[Any, Any], Any]) -> Call:
        def call() -> Any:
            with torch.inference_mode():
                return run(ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)).cpu().numpy()

        return call

    calls = {"PyTorch": caller(embeddings)}
    if on_card:
        torch._dynamo.reset()
        calls["torch.compile"] = caller(torch.compile(embeddings, mode="reduce-overhead", dynamic=False))
    else:
        left_out["torch.compile"] = "it is compared on a card"
    return calls


def lines_of_peers(rows: list[dict[str, Any]], of_device: dict[str, float], dollars: float | None) -> Iterator[str]:
    """The tables' lines, and what was left out. ``dollars``: an hour."""
    names = (
        "model",
        "texts",
        "runner",
        "ms",
        "times PyTorch's best",
        "card alone, ms",
        "of the ceiling",
        "$ per million",
    )
    yield f"| {' | '.join(names)} |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        theirs = [times for name, times in row["times"].items() if not name.startswith("encast")]
        for name, times in row["times"].items():
            taken = statistics.median(times)
            ratio = ""
            if theirs and name.startswith("encast"):
                ratios = [min(round) / mine for *round, mine in zip(*theirs, times, strict=True)]
                ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            alone = row["card alone"].get(name)
            ceiling = of_device.get("f8" if name.endswith("f8") else "f16")
            share = f"{row['operations'] / alone / 1e9 / ceiling:.2f}" if alone and ceiling else ""
            price = "" if dollars is None else f"{dollars / 3.6 * taken / row['texts']:.4f}"
            cells = [row["model"], row["shape"], name, f"{taken:.3f}", ratio]
            cells += [f"{alone:.3f}" if alone else "", share, price]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "The ceiling, a product of cuBLAS of 8,192 cubed, TFLOP/s: " + ", ".join(
        f"{name} {of_device[name]:.0f}" for name in of_device
    )
    left_out = {(what, why) for row in rows for what, why in row["left out"].items() if what != "all"}
    for what, why in sorted(left_out):
        yield f"Left out: {what}: {why}"
    for row in rows:
        if "all" in row["left out"]:
            yield f"Left out: {row['model']}, {row['shape']}: {row['left out']['all']}"
    for row in rows:
        if "failed" in row:
            yield f"FAILED: {row['model']} {row['shape']}: {row['failed']}"
        elif not row.get("right", True):
            yield f"WRONG: {row['model']} {row['shape']}: smallest cosines {row['cosines']}"
