"""PyTorch and its compilers, ONNX Runtime, OpenVINO, CTranslate2 and sentence-transformers compute the model.

Checkpoints are tiny and made to show mistakes (no bias is zero, positions and token types weigh as much as words); what
a backend answers is compared with the float64 reference of encast's own graph. Backends that are absent are skipped.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from checkpoints import make_checkpoint
from torch_threads import one_operation_at_a_time  # noqa: F401, a fixture of all tests here

import encast.bench
from encast import _core
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.bench.agreement import LEAST_COSINE, plain_graph
from encast.bench.peers.base import Encoder, ModelFiles, PaddedPeer, Peer, load_peer, read_encoder
from encast.errors import EncastError, InputError, ResourceError
from encast.sparsity import Pattern, prune_checkpoint

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

CONF = Path(encast.bench.__file__).parent / "conf" / "backend"
MODULES = ("pytorch", "onnxruntime", "openvino", "ctranslate2", "sentence_transformers")
YAMLS = {
    path.stem: config
    for path in sorted(CONF.glob("*.yaml"))
    if (config := yaml.safe_load(path.read_text()))["peer"].rpartition(":")[0].rpartition(".")[2] in MODULES
}
SPARSE = "openvino-int8-sparse"
"""Has products of its own on AMX alone, and for weights with zeros."""
WIDE = [name for name in YAMLS if name.endswith("-f32") and not name.startswith("torch-compile")]
CONVERTED = [name for name in YAMLS if name.startswith(("onnxruntime", "openvino", "torchscript", "ctranslate2"))]
LACKS = {level: missing for level, _, missing, *_ in _core.isa_levels()}  # what the processor has not, or ""
LENGTHS = (3, 11, 7, 16, 1)
THREADS = 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def model(arch: str) -> ModelFiles:
        folder = make_checkpoint(tmp_path_factory.mktemp("models") / arch, arch, "features", layers=1, vocab=320)
        rng = np.random.default_rng(1)
        rows = tuple(tuple(rng.integers(50, 320, 12).tolist()) for _ in range(8))
        return ModelFiles(f"tiny-{arch}", folder, f"sha-of-{arch}", rows)

    return model


def batch_of(model: ModelFiles, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    rng = np.random.default_rng(seed)
    types = read_encoder(model.checkpoint).type_vocab
    ids = [rng.integers(50, 300, length).tolist() for length in lengths]
    return Batch.of(ids, [rng.integers(0, types, length).tolist() for length in lengths] if types > 1 else None)


@functools.cache
def reference(checkpoint: Path) -> Reference:
    return Reference(plain_graph(checkpoint))


def cosine(states: Any, model: ModelFiles, batch: Batch) -> float:
    wanted = reference(model.checkpoint).evaluate("last_hidden_state", batch)
    assert states.dtype == np.float32
    assert states.shape == wanted.shape
    return float(np.mean((states * wanted).sum(1) / np.linalg.norm(states, axis=1) / np.linalg.norm(wanted, axis=1)))


def make(name: str, model: ModelFiles, cache: Path, threads: int = THREADS, **options: Any) -> Peer:
    given = {key: value for key, value in YAMLS[name].items() if key not in ("name", "peer", "dtype")}
    return load_peer(YAMLS[name]["peer"])(model, YAMLS[name]["dtype"], threads, cache, **{**given, **options})


def present(name: str) -> None:
    reason = load_peer(YAMLS[name]["peer"]).missing()
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@pytest.fixture(autouse=True)
def signal_stack() -> Iterator[None]:
    """OpenVINO's plugin may leave the thread an alternate signal stack that is unmapped with it, on which the next
    handler of any signal would end the process: a worker's end is near, this one's is not."""
    libc, kept = ctypes.CDLL(None), ctypes.create_string_buffer(24)  # stack_t
    assert libc.sigaltstack(None, kept) == 0
    yield
    assert libc.sigaltstack(kept, None) == 0


@pytest.fixture
def opened() -> Iterator[Any]:
    peers: list[Peer] = []

    def open_peer(name: str, model: ModelFiles, cache: Path, **options: Any) -> Peer:
        present(name)
        peer = make(name, model, cache, **options)
        peer.export()
        try:
            peer.open()
        except ResourceError as error:
            # Never on a processor that multiplies bf16.
            if name != "openvino-bf16" or not LACKS["avx512bf16"] or "names no BF16" not in str(error):
                raise
            pytest.skip(str(error))
        peers.append(peer)
        return peer

    yield open_peer
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("name", [name for name in YAMLS if name != SPARSE])
def test_a_dtype_agrees(name: str, models: Any, cache: Path, opened: Any) -> None:
    # RoBERTa counts positions with integers, which a quantiser of whole graphs may take for numbers.
    model = models("roberta" if name == "torch-compile-int8" else "bert")
    peer = opened(name, model, cache)
    first, second, full = batch_of(model, 0), batch_of(model, 1), batch_of(model, 2, (9, 9))
    bound = LEAST_COSINE[YAMLS[name]["dtype"]]
    assert cosine(peer.bind(first)(), model, first) >= bound
    calls = [(peer.bind(batch), batch) for batch in (first, second, full)]
    for call, batch in (*calls, *calls[::-1]):
        assert cosine(call(), model, batch) >= bound
    facts = peer.facts()
    assert facts["version"]
    json.dumps(facts)


@pytest.mark.parametrize("arch", ["distilbert", "roberta", "mpnet"])
@pytest.mark.parametrize("name", WIDE)
def test_other_architectures_agree(name: str, arch: str, models: Any, cache: Path, opened: Any) -> None:
    """roberta and mpnet number positions behind the id of padding; mpnet has relative positions as well."""
    model = models(arch)
    if name.startswith("ctranslate2") and arch == "mpnet":
        present(name)
        with pytest.raises(InputError, match="no encoder for mpnet models; it has bert"):
            make(name, model, cache).export()
        return
    peer = opened(name, model, cache)
    batch = batch_of(model)
    assert cosine(peer.bind(batch)(), model, batch) >= LEAST_COSINE["f32"]


@pytest.mark.parametrize(
    "name", [name for name in YAMLS if name.startswith(("onnx", "openvino", "torchscript", "ctr"))]
)
def test_a_conversion_is_made_once(name: str, models: Any, cache: Path) -> None:
    present(name)
    made = make(name, models("bert"), cache).export()
    path = Path(made["path"])
    assert path.exists()
    assert path.is_relative_to(cache)
    before = path.stat().st_mtime_ns
    assert make(name, models("bert"), cache, threads=1).export() == made
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", [name for name in YAMLS if name.endswith("-f32")])
def test_options_and_requests_are_checked(name: str, models: Any, cache: Path, opened: Any) -> None:
    model = models("bert")
    with pytest.raises(InputError, match=r"no option 'colour'; it has: "):
        make(name, model, cache, colour="red")
    with pytest.raises(InputError, match=r"has no f64; it has f32"):
        load_peer(YAMLS[name]["peer"])(model, "f64", 1, cache)
    if name.startswith("torch-compile"):
        return  # opening it takes seconds, and adds nothing here
    peer = opened(name, model, cache)
    with pytest.raises(InputError, match="sequence 0 has 49 tokens; the model takes at most 48"):
        peer.bind(batch_of(model, 0, (49,)))
    with pytest.raises(InputError, match="the model takes 0 to 319"):
        peer.bind(Batch.of([[320]]))


@pytest.mark.parametrize(
    ("name", "option", "value", "accepted"),
    [
        ("pytorch-f32", "linear", "eigen", "mkl, onednn"),
        ("onnxruntime-f32", "graph", "best", "fused, plain"),
        ("onnxruntime-int8", "quantisation", "none", "dynamic, static"),
    ],
)
def test_values_of_options_are_checked(
    name: str, option: str, value: object, accepted: str, models: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"{option} is {value!r}; .*{accepted}"):
        make(name, models("bert"), tmp_path, **{option: value})


@pytest.mark.parametrize("name", ["onnxruntime-static-int8", "openvino-int8"])
def test_static_quantisation_asks_for_calibration(name: str, models: Any, tmp_path: Path) -> None:
    present(name)
    given = models("bert")
    bare = ModelFiles(given.name, given.checkpoint, given.sha)
    with pytest.raises(EncastError, match="no calibration sequences"):
        make(name, bare, tmp_path).export()
    assert not list(tmp_path.rglob("*.onnx"))


def test_attention_is_fused_in_every_layer(models: Any, cache: Path, opened: Any) -> None:
    for name in ("onnxruntime-f32", "onnxruntime-int8"):
        fused: Mapping[str, int] = opened(name, models("bert"), cache).facts()["fused"]
        assert fused["Attention"] == 1
        assert fused["SkipLayerNormalization"] == 2
    assert "Attention" not in opened("onnxruntime-static-int8", models("bert"), cache).facts()["fused"]


def test_openvino_compiles_so_many_shapes(
    models: Any, cache: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("bert")
    monkeypatch.setattr("encast.bench.peers.openvino._STATIC_SHAPES", 1)
    peer = opened("openvino-f32", model, cache)
    batches = [batch_of(model, 0, lengths) for lengths in ((4, 6), (8,), (5, 6))]
    calls = [(peer.bind(batch), batch) for batch in batches]
    assert list(peer.facts()["static_shapes"]) == ["2x6"]
    for call, batch in calls:
        assert cosine(call(), model, batch) >= LEAST_COSINE["f32"]


@pytest.fixture(scope="module")
def with_zeros(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Products large enough for the kernels of a weight with zeros."""
    place = tmp_path_factory.mktemp("zeros")
    dense = make_checkpoint(place / "dense", "bert", "features", layers=1, vocab=320, hidden=128, inner=256, heads=2)
    prune_checkpoint(dense, place / "pruned", pattern=Pattern(4, 1), sparsity=0.9)
    rows = tuple(tuple(np.random.default_rng(1).integers(50, 320, 12).tolist()) for _ in range(8))
    return ModelFiles("zeros", place / "pruned", "sha-of-zeros", rows)


def test_openvino_leaves_out_zeros_where_it_can(with_zeros: ModelFiles, cache: Path, opened: Any) -> None:
    peer, batch = opened(SPARSE, with_zeros, cache), batch_of(with_zeros, 0, (32, 32))
    if LACKS["amx"]:
        with pytest.raises(ResourceError, match=r"compiled no product with sparse weights: .* take openvino-int8"):
            peer.bind(batch)
        return
    assert cosine(peer.bind(batch)(), with_zeros, batch) >= LEAST_COSINE["int8"]
    facts = peer.facts()
    assert (facts["sparse_rate"], facts["sparse_products"]) == (0.5, 6)
    assert "sparse_rate" not in opened("openvino-int8", with_zeros, cache).facts()


def test_openvino_says_when_there_are_no_zeros(models: Any, cache: Path, opened: Any) -> None:
    """The plugin takes the dense products and says nothing."""
    peer = opened(SPARSE, models("bert"), cache)
    with pytest.raises(ResourceError, match="weights with 50% of zeros and more"):
        peer.bind(batch_of(models("bert")))


def test_openvino_has_sparse_weights_in_int8_alone(models: Any, cache: Path) -> None:
    present("openvino-f32")
    peer = make("openvino-f32", models("bert"), cache, sparse_rate=0.5)
    with pytest.raises(InputError, match="stores weights without zeros in int8; leave sparse_rate out for f32"):
        peer.open()


def test_a_hint_is_tried_once(models: Any, cache: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("encast.bench.peers.openvino")
    monkeypatch.setattr(module, "fastest", lambda candidates: list(candidates)[-1])
    model = models("bert")
    for tried in (True, False):
        peer = opened("openvino-f32", model, cache)
        peer._hints = ("bf16", "f32")  # the second one is found, as nothing but the trial can say
        made: list[str] = []

        def request(shape: Any, hint: str, made: list[str] = made) -> Any:
            made.append(hint)
            return SimpleNamespace(hint=hint, states=lambda feeds: lambda: None)

        monkeypatch.setattr(peer, "_request", request)
        peer.bind(batch_of(model, 0, (3, 9)))
        assert peer.tried is tried
        assert made == (["bf16", "f32", "f32"] if tried else ["f32"])
        assert peer.facts()["static_shapes"] == {"2x9": "f32"}


def test_a_checkpoint_that_was_read_is_not_read_again() -> None:
    given = {"arch": "bert", "heads": 2, "hidden": 8, "vocab": 9, "type_vocab": 2, "max_len": 16}
    known = ModelFiles("none", Path("nowhere"), "sha", (), given)
    assert make("ctranslate2-f32", known, Path("cache")).encoder == Encoder(**given)


@pytest.mark.parametrize("name", WIDE)
def test_the_threads_are_those_that_were_given(name: str, models: Any, cache: Path, opened: Any) -> None:
    for threads in (1, 2):
        facts = opened(name, models("bert"), cache, threads=threads).facts()
        assert facts.get("threads", facts.get("inference_num_threads")) == threads
        assert facts.get("interop_threads", facts.get("num_streams")) in (1, "1")


def test_what_is_absent_is_found_out_without_importing_it() -> None:
    # Whether there is a card, its packages alone can tell.
    code = (
        "import sys, yaml\nfrom encast.bench.peers.base import load_peer\n"
        f"for target in {sorted({config['peer'] for name, config in YAMLS.items() if '-cuda-' not in name})!r}:\n"
        "    reason = load_peer(target).missing()\n"
        "    assert reason is None or 'pip install' in reason, reason\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "onnx", "onnxruntime", "openvino", "ctranslate2", "sentence_transformers"}
    assert not heavy & set(done.stdout.split())


def test_what_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, config in YAMLS.items():
        reason = load_peer(config["peer"]).missing()
        assert reason is not None
        extra = name.rpartition("-")[0].split("-plain")[0].split("-static")[0].split("-onednn")[0].split("-int8")[0]
        extra = "torch" if extra in ("pytorch", "torchscript", "torch-compile") else extra
        assert f"pip install 'encast[bench-{extra}]'" in reason


def test_openvino_refuses_bf16_where_it_names_none(models: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present("openvino-bf16")
    core = importlib.import_module("openvino").Core
    monkeypatch.setattr(core, "get_property", lambda *names: ["FP32", "INT8"])
    peer = make("openvino-bf16", models("bert"), cache)
    peer.export()
    with pytest.raises(ResourceError, match=r"names no BF16 .*; take openvino-f32 or openvino-int8"):
        peer.open()


def test_a_peer_whose_modules_are_not_there_is_missing() -> None:
    class Mine(Peer):
        name, dtypes, modules = "mine", ("f32",), ("my_runtime", "json", "my_tools.parts")

        def open(self) -> None: ...

        def bind(self, batch: Batch) -> Any: ...

    assert Mine.missing() == "not installed (my_runtime, my_tools): install what has my_runtime, my_tools"
    Mine.modules = ("json", "importlib.util")
    assert Mine.missing() is None


def test_padding_and_back(tmp_path: Path) -> None:
    class Echo(PaddedPeer):
        name, dtypes = "echo", ("f32",)

        def open(self) -> None: ...

        def prepare(self, feeds: Any) -> Any:
            self.feeds = feeds
            return lambda: np.stack([feeds["input_ids"], feeds["token_type_ids"]], -1).astype(np.float32)

    sizes = {"arch": "bert", "heads": 1, "hidden": 2, "vocab": 9, "type_vocab": 2, "max_len": 16}
    peer = Echo(ModelFiles("none", Path("nowhere"), "sha", (), sizes), "f32", 1, tmp_path)
    assert peer.bind(Batch.of([[5, 6, 7], [8]], [[0, 0, 1], [1]]))().tolist() == [[5, 0], [6, 0], [7, 1], [8, 1]]
    assert {name: array.tolist() for name, array in peer.feeds.items()} == {
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "token_type_ids": [[0, 0, 1], [1, 0, 0]],
    }
    assert peer.bind(Batch.of([[1, 2], [3, 4]]))().tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]
    assert list(Encoder(**{**sizes, "type_vocab": 1}).feeds(Batch.of([[1]]))) == ["input_ids", "attention_mask"]
