"""Opening damaged, foreign and hostile artifacts: always an ArtifactError, with a reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import FILES, edit_card, refresh, write_artifact

from encast import artifact
from encast.artifact.safetensors import header_size, parse_header
from encast.artifact.strict_json import parse_json
from encast.errors import ArtifactError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "m.encast")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m.encast"))


def read(path: Path) -> None:
    artifact.open(path).verify()


def test_the_whole_one_is_fine(whole: Path) -> None:
    read(whole)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_found(copy: Path, name: str) -> None:
    path = copy / name
    data = bytearray(path.read_bytes())
    random = np.random.default_rng(0)
    # The beginning holds lengths, names and the card's own checksum: every byte of it. Then samples.
    places = {*range(min(len(data), 120)), *random.integers(0, len(data), 250).tolist(), len(data) - 1}
    for place in sorted(places):
        flip = 1 << int(random.integers(8))
        data[place] ^= flip
        path.write_bytes(data)
        with pytest.raises(ArtifactError):
            read(copy)
        data[place] ^= flip
    path.write_bytes(data)
    read(copy)


@pytest.mark.parametrize("name", FILES)
def test_any_whitespace_for_another_is_found(copy: Path, name: str) -> None:
    path = copy / name
    data = path.read_bytes()
    for byte, other in ((b" ", b"\t"), (b"\n", b" ")):
        place = data.rfind(byte, 0, 2000)
        if place >= 0:
            path.write_bytes(data[:place] + other + data[place + 1 :])
            with pytest.raises(ArtifactError):
                read(copy)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.5, -1])
def test_truncated(copy: Path, name: str, kept: float) -> None:
    data = (copy / name).read_bytes()
    end = int(kept * len(data)) if isinstance(kept, float) else kept
    (copy / name).write_bytes(data[:end])
    with pytest.raises(ArtifactError):
        read(copy)


@pytest.mark.parametrize("name", FILES)
def test_longer(copy: Path, name: str) -> None:
    with (copy / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(ArtifactError):
        read(copy)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["missing", "folder", "dangling link"])
def test_files_that_are_none(copy: Path, name: str, kind: str) -> None:
    (copy / name).unlink()
    if kind == "folder":
        (copy / name).mkdir()
    elif kind == "dangling link":
        (copy / name).symlink_to("nowhere")
    with pytest.raises(ArtifactError, match=name):
        read(copy)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", FILES)
def test_unreadable(copy: Path, name: str) -> None:
    (copy / name).chmod(0)
    with pytest.raises(ArtifactError, match="Permission denied"):
        read(copy)


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ArtifactError, match="is no folder"):
            artifact.open(path)
    with pytest.raises(ArtifactError, match=r"card\.json is missing"):
        artifact.open(tmp_path)


def test_other_files_do_not_matter(copy: Path) -> None:
    (copy / ".DS_Store").write_bytes(b"\0")
    read(copy)


@pytest.mark.parametrize("version", [0, 1, "2", None, True])
def test_another_version_says_so(copy: Path, version: Any) -> None:
    edit_card(copy, lambda card: card.update(format_version=version))
    with pytest.raises(ArtifactError, match=r"format version .* this encast reads version 2"):
        read(copy)


def with_graph(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        graph = json.loads((path / "graph.json").read_bytes())
        change(graph)
        refresh(path, "graph.json", json.dumps(graph).encode())

    return spoil


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        data = (path / "weights.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        change(header)
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        refresh(path, "weights.safetensors header", len(text).to_bytes(8, "little") + text)

    return spoil


def header_is_a_list(path: Path) -> None:
    text = b"[]" + b" " * 54
    refresh(path, "weights.safetensors header", len(text).to_bytes(8, "little") + text)


def with_card(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda path: edit_card(path, change)


def extra_tensor(path: Path) -> None:
    def add(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header["extra"] = {"dtype": "U8", "shape": [64], "data_offsets": [end, end + 64]}

    with_header(add)(path)
    with (path / "weights.safetensors").open("ab") as file:
        file.write(bytes(64))
    edit_card(path, lambda card: card["tensors"].update(extra="0" * 16))


WORD = "embeddings.word.weight"
QKV = "encoder.layer.0.attention.self.qkv.weight.int8"

HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    # Whoever writes these knows how to compute checksums.
    "extra tensor": (extra_tensor, "does not know.*'extra'"),
    "tensor gone": (with_graph(lambda g: g["constants"].pop(WORD)), "named 'embeddings.word.weight'"),
    "other shape": (
        with_graph(lambda g: g["constants"].update({WORD: "f32[71, 30]"})),
        r"the graph needs f32\[71, 30\]",
    ),
    "shape too large": (with_graph(lambda g: g["constants"].update({WORD: "f32[1099511627775, 30]"})), "needs f32"),
    "symbolic constant": (
        with_graph(lambda g: g["constants"].update({WORD: "f32[tokens, 30]"})),
        "depend on the batch",
    ),
    "other dtype": (with_graph(lambda g: g["constants"].update({QKV: "f32[90, 30]"})), "matrix of s8 is needed"),
    "unread constant": (with_graph(lambda g: g["constants"].update(stray="f32[3]")), "read by no node"),
    "unknown op": (with_graph(lambda g: g["nodes"][0].update(op="system")), "no op is named 'system'"),
    "op of another type": (with_graph(lambda g: g["nodes"][0].update(op=["linear"])), "no op is named"),
    "attribute of another type": (
        with_graph(lambda g: g["nodes"][1]["attrs"].update(activation=["gelu"])),
        "attribute",
    ),
    "no heads": (
        with_graph(lambda g: next(n for n in g["nodes"] if n["op"] == "attention")["attrs"].update(heads=0)),
        "heads=0",
    ),
    "operand later": (with_graph(lambda g: g["nodes"].reverse()), "no value, constant or input"),
    "value twice": (with_graph(lambda g: g["nodes"].append(g["nodes"][0])), "already taken"),
    "foreign input": (with_graph(lambda g: g["inputs"].update(more="f32[tokens, 3]")), "has an input more"),
    "input of another type": (with_graph(lambda g: g["inputs"].update(token_ids="i32[seqs]")), "token_ids"),
    "no outputs": (with_graph(lambda g: g.update(outputs={})), "no output"),
    "output of nothing": (with_graph(lambda g: g["outputs"].update(logits="nothing")), "'nothing'"),
    "no nodes": (with_graph(lambda g: g.pop("nodes")), "malformed.*nodes"),
    "nodes no list": (with_graph(lambda g: g.update(nodes=7)), "malformed"),
    "graph is a list": (lambda path: refresh(path, "graph.json", b"[]"), "no JSON object"),
    "meta without vocab": (with_graph(lambda g: g["meta"].pop("vocab")), r"meta\['vocab'\]"),
    "vocab is text": (with_graph(lambda g: g["meta"].update(vocab="70")), r"meta\['vocab'\] is '70'"),
    "layers is true": (with_graph(lambda g: g["meta"].update(layers=True)), r"meta\['layers'\]"),
    "meta is a list": (with_graph(lambda g: g.update(meta=[1])), "malformed"),
    "key twice": (
        lambda path: refresh(path, "graph.json", b'{"nodes": [], "nodes": []}'),
        "'nodes' stands twice",
    ),
    "not a number": (lambda path: refresh(path, "graph.json", b'{"meta": NaN}'), "NaN is no JSON number"),
    "endless nesting": (lambda path: refresh(path, "graph.json", b"[" * 100_000), "not well-formed"),
    "huge integer": (lambda path: refresh(path, "graph.json", b"1" * 10_000), "not well-formed"),
    "graph not UTF-8": (lambda path: refresh(path, "graph.json", b"\xff{}"), "not well-formed"),
    "tokenizer not UTF-8": (lambda path: refresh(path, "tokenizer.json", b"\xff"), "not UTF-8"),
    "header is a list": (header_is_a_list, "no JSON object"),
    "overlap": (with_header(lambda h: h[WORD].update(data_offsets=[0, 8400 - 64])), "bytes, but has|begins at"),
    "gap": (with_header(lambda h: h[WORD].update(data_offsets=[64, 64 + 8400])), "begins at byte"),
    "negative offset": (with_header(lambda h: h[WORD].update(data_offsets=[-64, 0])), "data_offsets"),
    "offset past everything": (with_header(lambda h: h[WORD].update(data_offsets=[0, 1 << 60])), "data_offsets"),
    "fraction as offset": (with_header(lambda h: h[WORD].update(data_offsets=[0, 1.5])), "data_offsets"),
    "shape that lies": (with_header(lambda h: h[WORD].update(shape=[30, 71])), "bytes, but has"),
    "shape of text": (with_header(lambda h: h[WORD].update(shape="70")), "shape"),
    "many dimensions": (with_header(lambda h: h[WORD].update(shape=[1] * 40)), "shape"),
    "unknown dtype": (with_header(lambda h: h[WORD].update(dtype="F8")), "'F8'"),
    "dtype of another type": (with_header(lambda h: h[WORD].update(dtype=["F32"])), "dtype"),
    "entry too many": (with_header(lambda h: h[WORD].update(more=1)), "not exactly"),
    "entry is a number": (with_header(lambda h: h.update({WORD: 5})), "not exactly"),
    "tensor without checksum": (with_card(lambda c: c["tensors"].pop(WORD)), "no checksum"),
    "checksum without tensor": (with_card(lambda c: c["tensors"].update(more="0" * 16)), "lacks tensors.*'more'"),
    "checksum of text": (with_card(lambda c: c["tensors"].update({WORD: "word"})), "malformed"),
    "checksums are a list": (with_card(lambda c: c.update(tensors=[])), "malformed"),
    "no file checksums": (with_card(lambda c: c.pop("files")), "malformed"),
    "file without checksum": (with_card(lambda c: c["files"].pop("graph.json")), "lists nothing"),
    "card of something else": (with_card(lambda c: c.update(format="onnx")), "not the card"),
    "wrong checksum of a tensor": (with_card(lambda c: c["tensors"].update({WORD: "0" * 16})), "does not match"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile(copy: Path, kind: str) -> None:
    spoil, reason = HOSTILE[kind]
    spoil(copy)
    with pytest.raises(ArtifactError, match=reason):
        read(copy)


def test_a_header_longer_than_the_file(copy: Path) -> None:
    path = copy / "weights.safetensors"
    data = path.read_bytes()
    for length in (len(data), 1 << 40, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        with pytest.raises(ArtifactError, match="header claims"):
            read(copy)
    with pytest.raises(ArtifactError, match="no multiple of 64"):
        header_size((57).to_bytes(8, "little"), 1000, "w")


def test_tensors_of_another_alignment() -> None:
    entries = {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]},
    }
    text = json.dumps(entries).encode()
    header = (len(text)).to_bytes(8, "little") + text + b" " * (-(8 + len(text)) % 64)
    with pytest.raises(ArtifactError, match=r"'b' begins at byte .* no multiple of 64"):
        parse_header(header, len(header) + 16, {"a": 0, "b": 0}, "w")


def test_a_file_of_many_gigabytes_is_not_read(copy: Path) -> None:
    for name in ("card.json", "graph.json", "tokenizer.json"):
        old = (copy / name).read_bytes()
        os.truncate(copy / name, 1 << 36)
        with pytest.raises(ArtifactError, match="at most"):
            artifact.open(copy)
        (copy / name).write_bytes(old)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_any_json_in_place_of_any_part_of_the_graph(copy: Path, data: st.DataObject) -> None:
    original = (copy / "graph.json").read_bytes()
    card = (copy / "card.json").read_bytes()
    graph = json.loads(original)
    place: Any = graph
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(JSON)
    refresh(copy, "graph.json", json.dumps(graph).encode())
    try:
        read(copy)
    except ArtifactError:
        pass
    finally:
        (copy / "graph.json").write_bytes(original)
        (copy / "card.json").write_bytes(card)


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_any_bytes_as_header(data: bytes) -> None:
    header = len(data).to_bytes(8, "little") + data
    with pytest.raises(ArtifactError):
        parse_header(header + b" " * (-len(header) % 64), 1 << 20, {}, "w")


@given(data=st.binary(max_size=60))
def test_strict_json_raises_nothing_else(data: bytes) -> None:
    try:
        parse_json(data, "f")
    except ArtifactError:
        return
