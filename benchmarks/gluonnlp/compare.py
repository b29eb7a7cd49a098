"""The artifacts of GluonNLP's files beside GluonNLP's own answers: what ``write.py`` left, compiled and run.

    python benchmarks/gluonnlp/compare.py OUT

A row has the largest difference of an answer over GluonNLP's largest answer, the norm of all differences over that of
its answers, and whether the artifact's tokenizer makes the ids that GluonNLP made of the texts. Ends with 1 if ids
differ; differences of answers have no limit here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import encast


def compare(folder: Path, work: Path) -> tuple[float, float, str]:
    """Difference over the largest answer, over the norm, and what became of the texts."""
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    wanted = np.load(folder / "answers.npy").astype(np.float64)
    source = folder / "net.params"
    artifact = encast.compile(source, work / f"{folder.name}.encast", dtype="f32")
    batch = encast.Batch.of(rows["ids"], rows["types"])
    select = np.arange(batch.tokens, dtype=np.int32) if rows["output"] == "words" else None
    with encast.load(artifact) as engine:
        output = "logits" if rows["output"] == "words" else rows["output"]
        found = np.asarray(engine.runnable.run(output, batch, select=select), np.float64)
    if found.shape != wanted.shape:
        sys.exit(f"{folder}: the artifact's answers are {found.shape}, GluonNLP's {wanted.shape}")
    apart = np.abs(found - wanted)
    ids = "no texts"
    if rows["texts"]:
        tokenizer = Tokenizer.from_file(str(artifact / "tokenizer.json"))
        encoded = [tokenizer.encode(*text) for text in rows["texts"]]
        own = [(one.ids, one.type_ids) for one in encoded]
        ids = "the same" if own == list(zip(rows["ids"], rows["types"], strict=True)) else "others"
    return float(apart.max() / np.abs(wanted).max()), float(np.linalg.norm(apart) / np.linalg.norm(wanted)), ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    folders = sorted(path for path in parser.parse_args().out.iterdir() if path.is_dir())
    good = True
    print("| model | largest difference | norm of the difference | ids of texts |\n| --- | ---: | ---: | --- |")
    for folder in folders:
        with tempfile.TemporaryDirectory() as work:
            largest, norms, ids = compare(folder, Path(work))
        good &= ids != "others"
        print(f"| {folder.name} | {largest:.1e} | {norms:.1e} | {ids} |", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
