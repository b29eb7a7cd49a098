"""Makes artifacts on one processor and runs them on another; called by qemu_haswell.sh, not by pytest.

python qemu_smoke.py make FOLDER    compile small models in every dtype, write down the digests of their answers
python qemu_smoke.py check FOLDER   run the same artifacts here: the same bits; compile one from the checkpoint too
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from checkpoints import CASES, inputs_of, make_case

import encast
from encast import _core

NAMES = ("bert-embed", "mpnet-classify", "albert-answer", "roberta-fill_mask", "bert-odd")
DTYPES = ("f32", "bf16", "int8")


def digest(artifact: Path, name: str) -> str:
    """Of the hidden states of the case's sequences."""
    inputs = inputs_of(CASES[name])
    with encast.load(artifact) as engine:
        states = engine.forward(inputs.token_ids, inputs.token_type_ids)
    return hashlib.sha256(b"".join(state.tobytes() for state in states)).hexdigest()


def make(folder: Path) -> None:
    digests = {}
    for name in NAMES:
        checkpoint = make_case(folder, CASES[name])
        for dtype in DTYPES:
            artifact = encast.compile(checkpoint, folder / f"{name}-{dtype}.encast", dtype=dtype)
            digests[artifact.name] = digest(artifact, name)
    (folder / "digests.json").write_text(json.dumps(digests))
    print(f"made {len(digests)} artifacts at level {_core.isa_best()}")


def check(folder: Path) -> None:
    missing = {name: lacks for name, _, lacks, *_ in _core.isa_levels()}
    assert _core.isa_best() == "avx2", f"the emulated processor runs {_core.isa_best()}"
    assert "avx512f" in missing["avx512"].split()
    for file, wanted in json.loads((folder / "digests.json").read_text()).items():
        name = file.removesuffix(".encast").rpartition("-")[0]
        assert digest(folder / file, name) == wanted, f"{file} answers differently here"
    artifact = encast.compile(folder / NAMES[0], folder / "here.encast", dtype="int8")
    with encast.load(artifact) as engine:
        print(f"embedded {engine.embed(['one text', 'another one']).shape} at level {_core.isa_best()}")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]))
