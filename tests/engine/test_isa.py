"""Every ISA level that this machine has: the forced kernels ran, and f32 and int8 have the same bits on all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiled import minilm_folder

import encast
from encast import _core
from encast.lower import Target

LEVELS = [name for name, *_ in _core.isa_levels()]
PROGRAM = """
import hashlib, json, sys
import numpy as np
from encast import _core, artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch

rng = np.random.default_rng(3)
lengths = [1, 5, 16, 33, 64, 128]
ids = rng.integers(1000, 20000, sum(lengths)).astype(np.int32)
batch = Batch(ids, np.cumsum([0, *lengths]).astype(np.int32))
answer = {"best": _core.isa_best()}
for path in sys.argv[1:]:
    cpu = CpuRunnable(artifact.open(path), threads=2)
    rows = cpu.run("embedding", batch)
    answer[path] = {
        "bits": hashlib.sha256(rows.tobytes()).hexdigest(),
        "rows": rows.tolist(),
        "kernels": sorted({name for _, names in cpu.kernels() for name in names}),
    }
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("minilm")
    paths = {
        dtype: encast.compile(minilm_folder(), folder / f"{dtype}.encast", dtype=dtype)
        for dtype in ("f32", "bf16", "int8")
    }
    paths["sparse"] = encast.compile(minilm_folder(), folder / "sparse.encast", sparse="always")
    static = encast.QuantSpec(activations="static", ranges="minmax", move_outliers=0.5)
    seen = encast.calibrate(minilm_folder(), ["A man is playing a guitar.", "Some words of no sense"], quant=static)
    paths["static"] = encast.compile(minilm_folder(), folder / "static.encast", quant=static, calibration=seen)
    return paths


@pytest.fixture(scope="module")
def best(artifacts: dict[str, Path]) -> dict[str, dict[str, object]]:
    return _answers(artifacts, _core.isa_best())


def _answers(artifacts: dict[str, Path], level: str) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, artifacts.values())],
        env={**os.environ, "ENCAST_ISA": level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["best"] == level
    return {dtype: answer[str(path)] for dtype, path in artifacts.items()}


@pytest.mark.parametrize("level", LEVELS)
def test_forced_level(level: str, artifacts: dict[str, Path], best: dict[str, dict[str, object]]) -> None:
    missing = next(row for row in _core.isa_levels() if row[0] == level)[2]
    if missing:
        pytest.skip(f"{level} needs {missing}, which this machine lacks")
    answers = _answers(artifacts, level)
    for dtype, answer in answers.items():
        for kernel in answer["kernels"]:
            isa = kernel.rsplit("_", 1)[1]
            assert LEVELS.index(isa) <= LEVELS.index(level), f"{kernel} ran at {level}"
        products = {kernel.rsplit("_", 1)[1] for kernel in answer["kernels"] if kernel.startswith("gemm")}
        if dtype == "int8" and level in ("avx2", "avxvnni", "avx512", "avx512vnni"):
            assert level in products
        if dtype == "sparse" and level in ("avx2", "avx512vnni"):
            assert f"sparse_q8_s8_s32_4x{16 if level == 'avx2' else 64}_{level}" in answer["kernels"]
        if dtype == "bf16" and level in ("avx2", "avx512", "avx512bf16", "amx"):
            assert level in products
    assert answers["f32"]["bits"] == best["f32"]["bits"]
    assert answers["int8"]["bits"] == answers["sparse"]["bits"] == best["int8"]["bits"]
    assert answers["static"]["bits"] == best["static"]["bits"] != best["int8"]["bits"]
    a, b = np.array(answers["bf16"]["rows"]), np.array(best["bf16"]["rows"])
    assert (a * b).sum(1).min() > 0.9999


def test_classes_of_a_slow_level_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row[:4] for row in _core.isa_levels()]
    allowed = [name for name, _, _, may in rows if may]

    def chosen(*slow: str) -> str:
        monkeypatch.setattr(_core, "isa_levels", lambda: [(*row, "slow" if row[0] in slow else "") for row in rows])
        target = Target.here()
        assert target.attention["bf16"] == target.gemm["bf16"]
        assert (target.gemm["f32"], target.gemm["q8"]) == ("f32", "s8")
        return target.gemm["bf16"]

    fastest = {"amx": "bf16_tile", "avx512bf16": "bf16_dp"}.get(allowed[-1], "bf16_fma")
    assert chosen() == fastest
    assert chosen("avx512bf16") == ("bf16_fma" if fastest == "bf16_dp" else fastest)


def test_an_unknown_level_is_refused(artifacts: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(artifacts["f32"])],
        env={**os.environ, "ENCAST_ISA": "avx9000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    for part in ("ResourceError", "avx9000", "avx2"):
        assert part in done.stderr


def test_hash_is_of_real_rows(best: dict[str, dict[str, object]]) -> None:
    rows = np.array(best["f32"]["rows"], np.float32)
    assert hashlib.sha256(rows.tobytes()).hexdigest() == best["f32"]["bits"]
    assert np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-5
