"""Texts to embeddings with MiniLM int8, tokenisation and pooling included, against OpenVINO at its best settings.

    python benchmarks/texts_to_embeddings.py --data FOLDER
    python benchmarks/texts_to_embeddings.py --data FOLDER --sets queries --seconds 60

The texts are 1,024 paragraphs of SQuAD's dev set and the 3,610 questions of NQ-open's dev set. The systems are those
of ``text_peers.py``, in processes of their own, and take turns as in `encast bench` (docs/howto/benchmark.md). The
limit is arithmetic alone: no padding, tokenisation for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import encast
from encast.batch import Batch
from encast.bench.agreement import plain_graph
from encast.bench.cache import default_cache
from encast.bench.config import load_jobs
from encast.bench.models import make_model
from encast.bench.peers.base import BackendSpec, ModelFiles
from encast.bench.roofline import Sizes, peak
from encast.bench.system import System
from encast.bench.timing import interleave
from encast.bench.worker import prepare
from encast.launch import Placement
from encast.measure.statistics import median_interval, ratio_interval
from encast.measure.workloads import real_texts

MODEL = "all-minilm-l6-v2"
PEERS = Path(__file__).with_name("text_peers.py")
SETS = {"squad": ("squad-paragraphs", 1024, 1.8), "queries": ("nq-queries", None, 1.5)}
"""Of each: the data set, how many of its texts, and the ratio that the project set itself."""
LEAST_COSINE = 0.98
CHECKED = 64
"""Texts whose embeddings are compared with the float64 reference."""


def reference(model: ModelFiles, texts: list[str], folder: Path) -> Any:
    """``f32[texts, hidden]``: embeddings of the plain model in float64."""
    artifact = encast.compile(model.checkpoint, folder / "reference.encast", dtype="f32", task="embed", exact=True)
    with encast.load(artifact, device="reference") as engine:
        return engine.embed(texts)


def compare(name: str, model: ModelFiles, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source, count, bar = SETS[name]
    texts = [str(text) for text in real_texts(source, args.data)[:count]]
    file = folder / f"{name}.json"
    file.write_text(json.dumps(texts))
    batch = Batch(np.arange(len(texts), dtype=np.int32), np.arange(len(texts) + 1, dtype=np.int32))
    specs = [
        BackendSpec(
            "encast", f"{PEERS}:EncastTexts", "int8", options={"texts": str(file), "folder": str(folder / name)}
        ),
        BackendSpec("OpenVINO", f"{PEERS}:OpenVinoTexts", "int8", options={"texts": str(file)}),
    ]
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    whole = Placement(cpus, None, args.threads)
    chosen = np.linspace(0, len(texts) - 1, CHECKED).astype(int)
    expected = reference(model, [texts[index] for index in chosen], folder / name)
    systems = [System(spec, model, [whole], cache=args.cache) for spec in specs]
    seconds: dict[str, list[float]] = {spec.name: [] for spec in specs}

    def take(number: int, system: System) -> bool:
        (times,) = system.burst(calls=1)
        seconds[system.name].append(times[0] / 1e9)
        return True

    try:
        for system in systems:
            reason, _ = prepare(system.backend, model, args.threads, args.cache)
            if reason is not None:
                raise SystemExit(f"{system.name}: {reason}")
            system.open()
            system.bind([batch])
            system.verify()
            ((_, vectors),) = system.outputs()
            cosine = float((vectors[chosen] * expected).sum(1).mean())
            if not cosine >= LEAST_COSINE:
                raise SystemExit(f"{system.name}: mean cosine {cosine:.4f} to float64; {LEAST_COSINE} is needed")
        interleave(systems, take, args.seconds / 2)
        choice = systems[1].facts()["choice"]
    finally:
        for system in systems:
            system.close()
    ours, theirs = (list(seconds[spec.name]) for spec in specs)
    ratio = ratio_interval(theirs, ours)
    lengths = [len(ids) for ids in token_ids(model, texts)]
    operations = Sizes.of(plain_graph(model.checkpoint)).operations(
        Batch(np.empty(sum(lengths), np.int32), np.cumsum([0, *lengths], dtype=np.int32))
    )
    return {
        "set": name,
        "texts": len(texts),
        "tokens_mean": float(np.mean(lengths)),
        "encast_s": float(np.median(ours)),
        "encast_s_interval": median_interval(ours),
        "openvino_s": float(np.median(theirs)),
        "openvino_s_interval": median_interval(theirs),
        "openvino_choice": choice,
        "ratio": ratio.record(),
        "bar": bar,
        "fraction_of_limit": operations / peak("int8", args.threads) / float(np.median(ours)),
    }


def token_ids(model: ModelFiles, texts: list[str]) -> list[Any]:
    """As both systems cut them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.checkpoint / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with squad-v1.1/ and queries/")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seconds", type=float, default=50.0, help="of a set (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="of OpenVINO's graphs (%(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    (job,) = load_jobs([f"model={MODEL}", f"data='{args.data}'"])
    model = make_model(job.model, args.cache)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sets:
            (Path(folder) / name).mkdir()
            found = compare(name, model, args, Path(folder))
            if args.json:
                print(json.dumps(found), flush=True)
                continue
            ratio = found["ratio"]
            print(
                f"{name}, {found['texts']} texts of {found['tokens_mean']:.0f} tokens: "
                f"encast {found['encast_s']:.3f} s, OpenVINO {found['openvino_s']:.3f} s ({found['openvino_choice']}); "
                f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] times as fast (goal {found['bar']}), "
                f"{found['fraction_of_limit']:.2f} of the limit",
                flush=True,
            )


if __name__ == "__main__":
    main()
