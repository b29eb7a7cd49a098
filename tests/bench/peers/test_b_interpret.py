"""The table of array functions computes the graph: with NumPy, and as what is written for DeepSparse and TVM.

Written graphs are computed by ``fake_libraries`` everywhere, and by ONNX Runtime where it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from fake_libraries import Builder, FakeOnnx, fake_relax, run_onnx

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.bench.agreement import LEAST_COSINE
from encast.bench.peers.base import Encoder, ModelFiles
from encast.bench.peers.deepsparse import DeepSparse, calibrate, kernels_of, write
from encast.bench.peers.interpret import (
    ABSENT_OPS,
    HEAD_OPS,
    INTERPRETED,
    MASKED,
    ArrayLibrary,
    NumpyLike,
    input_types,
    inputs_of,
    interpret,
)
from encast.bench.peers.tvm import RelaxLibrary
from encast.errors import GraphError, ResourceError
from encast.importers import open_checkpoint
from encast.ir import OPS, Graph

ARCHS = ("bert", "distilbert", "roberta", "electra", "mpnet", "albert")
LENGTHS = (3, 11, 7, 16, 1)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graph]:
    root = tmp_path_factory.mktemp("models")
    return {arch: build_graph(open_checkpoint(make_checkpoint(root / arch, arch, "features"))) for arch in ARCHS}


def batch_of(graph: Graph, seed: int = 0) -> Batch:
    """Ragged, with token types where the model has them and the id that RoBERTa's positions skip."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, 200, length).tolist() for length in LENGTHS]
    ids[1][4] = 1
    types = int(graph.meta.type_vocab)
    return Batch.of(ids, [rng.integers(0, types, length).tolist() for length in LENGTHS] if types else None)


def rectangle(batch: Batch, more: int = 0, filling: int = 0) -> tuple[tuple[int, int], dict[str, Any]]:
    """Shape and inputs of a rectangle with so many columns more, padding filled with an id of choice."""
    feeds = Encoder("any", 1, 1, 200, 2, 32).feeds(batch)
    feeds = {name: np.pad(array, ((0, 0), (0, more))) for name, array in feeds.items()}
    feeds["input_ids"][feeds["attention_mask"] == 0] = filling
    return feeds["input_ids"].shape, inputs_of(feeds)


def tokens_of(states: Any, batch: Batch) -> Any:
    """The states of tokens, out of those of a rectangle, ``[rows * columns, hidden]``."""
    rectangle = states.reshape(batch.seqs, -1, states.shape[-1])
    return np.concatenate([row[:length] for row, length in zip(rectangle, np.diff(batch.cu_seqlens), strict=True)])


def cosines(states: Any, expected: Any) -> Any:
    a, b = states.astype(np.float64), expected.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def with_numpy(graph: Graph, batch: Batch, more: int = 0, filling: int = 0) -> Any:
    shape, given = rectangle(batch, more, filling)
    return tokens_of(interpret(graph, NumpyLike(), shape, given), batch)


def test_every_plain_op_is_interpreted_or_named_as_one_that_is_not() -> None:
    plain = {name for name, op in OPS.items() if op.plain}
    assert plain == INTERPRETED | HEAD_OPS | ABSENT_OPS
    assert not INTERPRETED & (HEAD_OPS | ABSENT_OPS)


@pytest.mark.parametrize("arch", ARCHS)
def test_agrees_with_the_reference(graphs: dict[str, Graph], arch: str) -> None:
    graph = graphs[arch]
    batch = batch_of(graph)
    found, expected = with_numpy(graph, batch), Reference(graph).run("last_hidden_state", batch)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert cosines(found, expected).mean() >= LEAST_COSINE["f32"]


@pytest.mark.parametrize("arch", ["roberta", "mpnet"])
def test_padding_changes_nothing(graphs: dict[str, Graph], arch: str) -> None:
    graph = graphs[arch]
    batch = batch_of(graph)
    narrow, wide = with_numpy(graph, batch), with_numpy(graph, batch, more=4, filling=7)
    np.testing.assert_allclose(wide, narrow, rtol=0, atol=1e-5)


def test_masked_keys_count_for_nothing_in_f32_and_stay_finite_in_bf16() -> None:
    row = np.float32([3.0, -40.0, 3.0 + MASKED])
    assert NumpyLike().softmax(row[None])[0, 2] == 0.0
    assert np.isfinite(np.float32(MASKED) + np.float32(MASKED))


def test_erf_is_as_good_as_its_formula() -> None:
    import math

    points = np.linspace(-6, 6, 4001)
    exact = np.array([math.erf(point) for point in points])
    assert np.abs(NumpyLike().erf(points) - exact).max() < 1.6e-7


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
def test_activations(kind: str) -> None:
    from encast.backends.reference.ops import EVALUATORS

    points = np.linspace(-8, 8, 401, dtype=np.float32)[None]
    expected = EVALUATORS["activation"](None, points.astype(np.float64), kind=kind)
    np.testing.assert_allclose(NumpyLike().activation(points, kind), expected, rtol=0, atol=2e-6)


def test_a_constant_keeps_one_name_and_comes_once(graphs: dict[str, Graph]) -> None:
    class Noting(NumpyLike):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def constant(self, name: str, array: Any) -> Any:
            self.names.append(name)
            return super().constant(name, array)

    for arch in ("albert", "mpnet"):  # one layer's weights, or one bias of positions, read by all layers
        shape, given = rectangle(batch_of(graphs[arch]))
        library = Noting()
        interpret(graphs[arch], library, shape, given)
        assert len(library.names) == len(set(library.names))


def test_refuses_a_graph_that_is_not_plain(graphs: dict[str, Graph]) -> None:
    graph = graphs["bert"].copy()
    graph.nodes[0].op = "quantize"
    shape, given = rectangle(batch_of(graph))
    with pytest.raises(GraphError, match=r"quantize has no function here; \['activation', "):
        interpret(graph, NumpyLike(), shape, given)


@pytest.mark.parametrize(("arch", "op"), [("modernbert", "rotary"), ("deberta-v2", "relative_scores")])
def test_refuses_what_it_has_no_function_for(arch: str, op: str, tmp_path: Path) -> None:
    graph = build_graph(open_checkpoint(make_checkpoint(tmp_path / arch, arch, "features")))
    shape, given = rectangle(batch_of(graph))
    with pytest.raises(GraphError, match=rf"{op} has no function here; \['activation', "):
        interpret(graph, NumpyLike(), shape, given)


def test_a_library_must_have_all_functions() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ArrayLibrary()  # type: ignore[abstract]


@pytest.mark.parametrize("arch", ARCHS)
def test_relax(graphs: dict[str, Graph], arch: str) -> None:
    graph, batch = graphs[arch], batch_of(graphs[arch])
    shape, arrays = rectangle(batch)
    library = RelaxLibrary(fake_relax(), Builder())
    given = {name: library.parameter(name, *kind) for name, kind in input_types(shape).items()}
    out = interpret(graph, library, shape, given)
    # The function takes them by their place: parameters and arrays must be in one order.
    weights = zip(library.parameters.values(), library.arrays.values(), strict=True)
    parameters = arrays | {weight.expr.name: array for weight, array in weights}
    assert len(parameters) == len(arrays) + len(library.arrays), "a name was given twice"
    states = tokens_of(out.expr.value(parameters), batch)
    assert cosines(states, Reference(graph).run("last_hidden_state", batch)).min() > 0.999999


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
def test_activations_in_relax(kind: str) -> None:
    from encast.backends.reference.ops import EVALUATORS

    points = np.linspace(-8, 8, 401, dtype=np.float32)[None]
    library = RelaxLibrary(fake_relax(), Builder())
    found = library.activation(library.constant("points", points), kind).expr.value({"weight0": points})
    expected = EVALUATORS["activation"](None, points.astype(np.float64), kind=kind)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def with_fake_onnx(graph: Graph, batch: Batch, ranges: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The written model, and what it computes."""
    onnx = FakeOnnx()
    monkeypatch.setitem(sys.modules, "onnx", onnx)
    shape, given = rectangle(batch)
    write(Path("model.onnx"), graph, shape, ranges)
    given = {name: array if name == "bias" else array.astype(np.int64) for name, array in given.items()}
    return onnx.saved, tokens_of(run_onnx(onnx.saved, given), batch)


@pytest.mark.parametrize("arch", ARCHS)
def test_deepsparse_graph_in_f32(graphs: dict[str, Graph], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, batch = graphs[arch], batch_of(graphs[arch])
    _, states = with_fake_onnx(graph, batch, None, monkeypatch)
    assert cosines(states, Reference(graph).run("last_hidden_state", batch)).min() > 0.999999


def test_deepsparse_graph_in_int8(graphs: dict[str, Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    graph, batch = graphs["bert"], batch_of(graphs["bert"])
    model, states = with_fake_onnx(graph, batch, ranges_of(graph), monkeypatch)
    check_int8(graph, [node.op_type for node in model.graph.node])
    found = cosines(states, Reference(graph).run("last_hidden_state", batch))
    assert LEAST_COSINE["int8"] <= found.mean() < 0.999999


ANALYSIS = [
    {"name": "Naive Subgraph 0", "canonical_name": "<none>"},
    {"name": "gather_0", "canonical_name": "<none>"},
    {"name": "pyramid_1", "canonical_name": "Add.2,ReduceMean.3,Sub.4"},
    {"name": "pyramid_2", "canonical_name": "MatMulInteger.21,Add.22"},
    {"name": "ks_gemm_hyb_q-80.2%_12", "canonical_name": "MatMulInteger.55"},
    {"name": "ks_gemm_hyb_q-79.9%_13", "canonical_name": "MatMulInteger.65, Add.66"},
    {"name": "gemm_14", "canonical_name": "Add.52"},
]
"""Layers as DeepSparse 1.8 reports them, of a weight with 80 % of zeros."""


def test_kernels_are_read_off_an_analysis() -> None:
    found = kernels_of(ANALYSIS, products=4)
    assert found["kernels"] == {"gather": 1, "gemm": 1, "ks_gemm_hyb_q": 2, "pyramid": 2}
    assert (found["integer_products"], found["of"]) == (3, 4)
    fallen = [{"name": "Naive Subgraph 1", "canonical_name": "MatMulInteger.70"}]
    assert kernels_of([*ANALYSIS, *fallen], products=4)["integer_products"] == 3, "that is no kernel of its own"


@pytest.mark.parametrize(("dtype", "own"), [("int8", 12), ("int8", 11), ("f32", 0)])
def test_deepsparse_has_no_int8_row_where_it_computes_f32(
    dtype: str, own: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysed: list[dict[str, Any]] = []

    def analyse(file: str, given: Any, **options: Any) -> Any:
        analysed.append(options)
        return {"layer_info": [{"name": f"pyramid_{at}", "canonical_name": f"MatMulInteger.{at}"} for at in range(own)]}

    library = SimpleNamespace(
        Engine=lambda file, **options: SimpleNamespace(input_names=["token_ids", "bias"]),
        model_debug_analysis=analyse,
        cpu=SimpleNamespace(cpu_architecture=lambda: SimpleNamespace(isa="avx512", vnni=True)),
        __version__="1.8.0",
    )
    monkeypatch.setitem(sys.modules, "deepsparse", library)
    monkeypatch.setitem(sys.modules, "onnx", FakeOnnx())
    monkeypatch.setattr("encast.bench.peers.base.version", lambda package: "1.8.0")
    folder = make_checkpoint(tmp_path / "model", "bert", "features", layers=2)
    model = ModelFiles("tiny", folder, "sha", tuple(tuple(range(50, 60 + n)) for n in range(4)))
    peer = DeepSparse(model, dtype, 2, tmp_path / "cache")
    if (dtype, own) == ("int8", 11):
        with pytest.raises(ResourceError, match="computes 11 of 12 integer products with kernels of its own"):
            peer.export()
        return
    peer.export()
    assert analysed[0]["num_cores"] == 2
    facts = peer.facts()
    assert facts["kernels"] == ({"pyramid": 12} if own else {})
    assert facts.get("integer_products") == ("12 of 12" if own else None)
    other = DeepSparse(model, dtype, 1, tmp_path / "cache")
    other.open()
    other.facts()
    assert len(analysed) == 1, "whoever is timed finds the analysis and makes none"


def ranges_of(graph: Graph) -> Any:
    encoder = Encoder("any", 1, 1, 200, 2, 32)
    texts = [np.random.default_rng(seed).integers(2, 200, 16).tolist() for seed in range(1, 5)]
    return calibrate(graph, [encoder.feeds(Batch.of([ids])) for ids in texts])


def check_int8(graph: Graph, kinds: list[str]) -> None:
    assert kinds.count("MatMulInteger") == 6 * graph.meta.layers, "every product with weights is narrow"
    # Queries, keys and values read one quantised value.
    assert kinds.count("QuantizeLinear") == 4 * graph.meta.layers


def onnx_states(file: Path, batch: Batch) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    _shape, given = rectangle(batch)
    given = {name: array if name == "bias" else array.astype(np.int64) for name, array in given.items()}
    wanted = [item.name for item in session.get_inputs()]
    (states,) = session.run(None, {name: given[name] for name in wanted})
    return tokens_of(states, batch)


@pytest.mark.parametrize("arch", ARCHS)
def test_onnx_in_f32(graphs: dict[str, Graph], arch: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    graph, file = graphs[arch], tmp_path / "model.onnx"
    batch = batch_of(graph)
    write(file, graph, rectangle(batch)[0])
    assert cosines(onnx_states(file, batch), Reference(graph).run("last_hidden_state", batch)).min() > 0.999999


def test_onnx_in_int8(graphs: dict[str, Graph], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    graph, file = graphs["bert"], tmp_path / "model.onnx"
    batch = batch_of(graph)
    write(file, graph, rectangle(batch)[0], ranges_of(graph))
    check_int8(graph, [node.op_type for node in onnx.load(str(file)).graph.node])
    found = cosines(onnx_states(file, batch), Reference(graph).run("last_hidden_state", batch))
    assert LEAST_COSINE["int8"] <= found.mean() < 0.999999
