"""How long a compiled BERT-base takes to open, and how much memory a batch of 65,536 packed tokens needs.

    python benchmarks/opening_and_memory.py

Weights are random and made with NumPy alone; neither time nor memory depends on them. Opening is everything from
encast.load to an engine that can answer, checksums of all tensors verified, page cache warm; the interpreter has
imported encast before, as a server has. Memory is what the process's peak resident set grows by during the call,
outputs not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HIDDEN, INNER, VOCAB = 12, 768, 3072, 30522


def make_bert_base(folder: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}

    def linear(name: str, size: int, inner: int) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((size, inner), np.float32) * np.float32(0.02)
        tensors[f"{name}.bias"] = np.zeros(size, np.float32)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{name}.bias"] = np.zeros(HIDDEN, np.float32)

    for name, rows in (("word", VOCAB), ("position", 512), ("token_type", 2)):
        tensors[f"embeddings.{name}_embeddings.weight"] = rng.standard_normal((rows, HIDDEN), np.float32)
    norm("embeddings.LayerNorm")
    for layer in range(LAYERS):
        path = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{path}.attention.self.{part}", HIDDEN, HIDDEN)
        linear(f"{path}.attention.output.dense", HIDDEN, HIDDEN)
        norm(f"{path}.attention.output.LayerNorm")
        linear(f"{path}.intermediate.dense", INNER, HIDDEN)
        linear(f"{path}.output.dense", HIDDEN, INNER)
        norm(f"{path}.output.LayerNorm")
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "intermediate_size": INNER,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def peak_kb() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def measure(artifact: str, tokens: int) -> dict[str, float]:
    import encast

    with encast.load(artifact) as engine:  # warms the page cache and every lazy import
        engine.forward([[1, 2, 3]])
    times = []
    for _ in range(15):
        start = time.perf_counter()
        with encast.load(artifact) as engine:
            times.append((time.perf_counter() - start) * 1e3)
    with encast.load(artifact) as engine:
        ids = np.random.default_rng(0).integers(0, VOCAB, tokens).astype(np.int32)
        cu_seqlens = np.arange(0, tokens + 1, 128, dtype=np.int32)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
        before = peak_kb()
        output = engine.forward_packed(ids, cu_seqlens)
        grown = (peak_kb() - before) / 1024 - output.nbytes / 2**20
    return {"open_ms": statistics.median(times), "open_worst_ms": max(times), "memory_mib": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.tokens)))
        return
    import encast

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_bert_base(folder / "checkpoint")
        for dtype in ("f32", "bf16", "int8"):
            path = encast.compile(folder / "checkpoint", folder / f"{dtype}.encast", dtype=dtype)
            size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
            command = [sys.executable, __file__, "--measure", str(path), "--tokens", str(args.tokens)]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"dtype": dtype, "artifact_mib": size, **answer})
            if not args.json:
                print(
                    f"BERT-base {dtype:5} {size:6.0f} MiB  opens in {answer['open_ms']:6.1f} ms "
                    f"(worst of 15: {answer['open_worst_ms']:.1f})  {args.tokens} tokens: "
                    f"{answer['memory_mib']:6.1f} MiB beyond the weights and outputs",
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
