"""Long texts, with positions that attention knows of: right, alike in any company and on all levels."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess
from checkpoints import make_checkpoint
from compiled import same_bits
from families import FAMILIES

import encast
from encast import _core, artifact
from encast.archs import build_graph
from encast.backends.cpu import CpuRunnable
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.importers import open_checkpoint
from encast.passes import optimise
from encast.quant import QuantSpec

FAST_ELEMENTARY = 16 * 2.0**-24
LENGTHS = (130, 1, 700, 64)
# Global, local, local, with 64 to each side as in the published models; the longest text has two blocks of keys in the
# global layer.
OPTIONS: dict[str, dict[str, Any]] = {
    "modernbert": {"layers": 3, "positions": 1200, "seed": 31, "config": {"local_attention": 128}},
    # With the buckets of the published models; the longest text has distances behind the last of them.
    "deberta-v2": {
        "layers": 2,
        "positions": 1200,
        "seed": 32,
        "config": {"position_buckets": 256, "max_relative_positions": 512, "conv_kernel_size": 3},
    },
    # No norm takes a mean away, so that a channel that is far out stays so; two heads of EuroBERT share their keys.
    **{arch: {"layers": 2, "positions": 1200, "seed": 34} for arch in FAMILIES},
    # Every distance has a vector; those of all heads are the same.
    "bert": {
        "layers": 2,
        "positions": 1200,
        "seed": 33,
        "config": {"position_embedding_type": "relative_key_query"},
    },
}


@functools.cache
def _folder(base: Path, arch: str) -> Path:
    return make_checkpoint(base / f"long-{arch}", arch, "features", **OPTIONS[arch])


@pytest.fixture(params=OPTIONS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.getbasetemp(), request.param)


@functools.cache
def _compiled(folder: Path, dtype: str) -> Path:
    return encast.compile(folder, folder.with_name(f"{folder.name}-{dtype}.encast"), dtype=dtype, strict=True)


def _texts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(6, 200, length).tolist() for length in lengths]


def test_f32_is_within_the_derived_bound(folder: Path) -> None:
    graph, batch = build_graph(open_checkpoint(folder)), Batch.of(_texts(LENGTHS))
    exact, allowed = allowed_difference(graph, "last_hidden_state", batch, elementary=FAST_ELEMENTARY)
    cpu = CpuRunnable(artifact.open(_compiled(folder, "f32")), threads=2)
    assert largest_excess(cpu.run("last_hidden_state", batch), exact, allowed) <= 1.0


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_narrow_dtypes_follow_the_reference(dtype: str, folder: Path) -> None:
    """As in test_exactness: the engine's own error is smaller than the dtype's."""
    plain, batch = build_graph(open_checkpoint(folder)), Batch.of(_texts(LENGTHS))
    graph, _ = optimise(plain, QuantSpec(dtype))
    got = CpuRunnable(artifact.open(_compiled(folder, dtype)), threads=2).run("last_hidden_state", batch)
    same, wide = (Reference(one).evaluate("last_hidden_state", batch) for one in (graph, plain))
    of_engine, of_dtype = (np.sqrt((difference**2).mean()) for difference in (got - same, same - wide))
    assert of_engine <= 0.7 * of_dtype + 1e-6 * np.sqrt((wide**2).mean())


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_bits_depend_on_the_text_alone(dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _texts((*LENGTHS, 1200, 400))
    one = CpuRunnable(artifact.open(_compiled(folder, dtype)), threads=1)
    alone = [one.run("last_hidden_state", Batch.of([text])) for text in texts]
    two = CpuRunnable(artifact.open(_compiled(folder, dtype)), threads=2)
    monkeypatch.setenv("ENCAST_BLOCK_ROWS", "32")
    small = CpuRunnable(artifact.open(_compiled(folder, dtype)), threads=2)
    for cpu in (one, two, small):
        for order in ([0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 3, 1]):
            rows = cpu.run("last_hidden_state", Batch.of([texts[index] for index in order]))
            ends = np.cumsum([len(texts[index]) for index in order])[:-1]
            for index, part in zip(order, np.split(rows, ends), strict=True):
                assert same_bits(part, alone[index])


PROGRAM = """
import hashlib, json, sys
import numpy as np
from encast import artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
batch = Batch.of(json.loads(sys.argv[1]))
answers = {path: CpuRunnable(artifact.open(path), threads=2).run("last_hidden_state", batch) for path in sys.argv[2:]}
print(json.dumps({path: hashlib.sha256(rows.tobytes()).hexdigest() for path, rows in answers.items()}))
"""


def test_f32_and_int8_have_the_same_bits_on_every_level(folder: Path) -> None:
    paths = [str(_compiled(folder, dtype)) for dtype in ("f32", "int8")]
    texts = _texts((140, 9))
    seen = {}
    for level, _, missing, *_ in _core.isa_levels():
        if missing:
            continue
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(texts), *paths],
            env={**os.environ, "ENCAST_ISA": level},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen[level] = json.loads(done.stdout)
    first = seen["scalar"]
    assert len(seen) > 1
    assert {level: answer for level, answer in seen.items() if answer != first} == {}
    rows = CpuRunnable(artifact.open(paths[0]), threads=1).run("last_hidden_state", Batch.of(texts))
    assert hashlib.sha256(rows.tobytes()).hexdigest() == first[paths[0]]
