"""Each way in which TensorFlow's files can lie ends in an error that says what is wrong and where, in little memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bundle_files import (
    block,
    ended,
    entry_bytes,
    field,
    header_bytes,
    masked_crc,
    meta_graph,
    number,
    saved_model,
    sealed,
    table,
    varint,
    write_bundle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.table_file import read_table

WORDS, DENSE = "bert/embeddings/word_embeddings", "bert/pooler/dense/kernel"
EIGHT = bytes(8)
EIGHT_CRC = masked_crc(EIGHT)
CONFIG = '{"vocab_size": 5, "hidden_size": 2, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 2}'


def good(folder: Path, shards: int = 2) -> Path:
    """A checkpoint of two variables, in small blocks; returns its prefix."""
    arrays = {WORDS: np.arange(10, dtype="f4").reshape(5, 2), DENSE: np.ones((2, 2), "f4")}
    (folder / "bert_config.json").write_text(CONFIG)
    return write_bundle(folder, arrays, shards=shards, block_size=30)


def index_of(entries: dict[str, bytes], header: bytes | None = None) -> bytes:
    return table({b"": header_bytes() if header is None else header} | {k.encode(): v for k, v in entries.items()})


def one(**options: int | tuple[int, ...]) -> bytes:
    """An index whose only variable is described by ``options``."""
    return index_of({WORDS: entry_bytes(**{"crc": EIGHT_CRC, **options})})  # type: ignore[arg-type]


def with_index(folder: Path, index: bytes, data: bytes = EIGHT) -> Path:
    (folder / "bert_config.json").write_text(CONFIG)
    (folder / "bert_model.ckpt.index").write_bytes(index)
    (folder / "bert_model.ckpt.data-00000-of-00001").write_bytes(data)
    return folder


def read_all(folder: Path) -> None:
    tensors = open_checkpoint(folder).tensors
    for name in tensors:
        tensors.f32(name)


def blocks_at(*handles: tuple[int, int]) -> bytes:
    """A table of one good block, whose index block says that blocks lie at ``handles``."""
    data = block([(b"", header_bytes()), (WORDS.encode(), entry_bytes(crc=EIGHT_CRC))])
    keys = [bytes([index]) for index in range(len(handles))]
    entries = [(key, varint(offset) + varint(size)) for key, (offset, size) in zip(keys, handles, strict=True)]
    return ended(sealed(data), entries)


def raw_block(data: bytes, kind: int = 0) -> bytes:
    """A table of one block with these bytes."""
    return ended(sealed(data, kind), [(b"z", varint(0) + varint(len(data)))])


GOOD_BLOCK = len(block([(b"", header_bytes()), (WORDS.encode(), entry_bytes(crc=EIGHT_CRC))]))
SLICED = number(1, 1) + field(2, field(2, number(1, 2))) + field(7, b"") + field(7, b"")
KEY = WORDS.encode()

LYING_INDICES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
    "no mark": (bytes(100), "the mark at its end is missing"),
    "only the mark": (table({})[-8:], "the mark at its end is missing"),
    "a footer of varints without end": (b"\xff" * 40 + table({})[-8:], "an integer of more than ten bytes"),
    "index block beyond the end": (varint(0) * 2 + varint(2**60) + varint(9) + bytes(29) + table({})[-8:], "beyond"),
    "no entries": (table({}), "it has no header"),
    "no header": (table({KEY: entry_bytes()}), "it has no header"),
    "a block twice": (blocks_at((0, GOOD_BLOCK), (0, GOOD_BLOCK)), "the block at byte 0 overlaps another one"),
    "the index block as a block": (blocks_at((GOOD_BLOCK + 18, 25)), "overlaps another one"),
    "a block of 2^60 bytes": (blocks_at((0, 2**60)), "overlaps another one"),
    "a block at 2^63": (blocks_at((2**63, 10)), "overlaps another one"),
    "snappy": (raw_block(b"\x00", 1), "compressed by Snappy, which is not read; no TensorFlow since 1.2"),
    "another compression": (raw_block(b"\x00", 7), "compressed by method 7"),
    "a block too short for restarts": (raw_block(b"\x00\x00"), "no room for its restart points"),
    "2^32 - 1 restarts": (raw_block(b"\xff" * 4), "no room for its restart points"),
    "more shared than there was": (raw_block(b"\x05\x01\x00a" + struct.pack("<2I", 0, 1)), "reaches beyond it"),
    "a key beyond the block": (raw_block(b"\x00\x7f\x00a" + struct.pack("<2I", 0, 1)), "reaches beyond it"),
    "a value of 2^60 bytes": (raw_block(b"\x00\x00" + varint(2**60) + struct.pack("<2I", 0, 1)), "beyond it"),
    "an entry cut short": (raw_block(b"\x80" + struct.pack("<2I", 0, 1)), "reaches beyond it|index out of range"),
    "keys out of order": (raw_block(block([(b"b", b""), (b"a", b"")])), "keys of the block at byte 0 are not in order"),
    "a key twice": (raw_block(block([(b"b", b""), (b"b", b"")])), "keys of the block at byte 0 are not in order"),
    "a header that is no message": (index_of({}, b"\x0b"), "wire type 3 at byte 1"),
    "no data files": (index_of({}, number(1, 0)), "says that it has 0 data files"),
    "2^64 - 1 data files": (index_of({}, number(1, 2**64 - 1)), "says that it has 18446744073709551615 data files"),
    "big-endian": (index_of({}, header_bytes(endian=1)), "big-endian"),
    "a later version": (index_of({}, header_bytes(min_consumer=9)), "version 9; version 1 is read"),
    "an entry that is no message": (index_of({WORDS: b"\x08"}), "not the index of a TensorFlow checkpoint"),
    "a number where a shape is needed": (index_of({WORDS: number(2, 5)}), "a number where bytes are needed"),
    "no variables": (index_of({}), "no variable is named bert/.*it is empty"),
    "no variable of BERT": (index_of({"a/kernel": entry_bytes()}), r"no variable is named bert/.*there is 'a/kernel'"),
    "objects": (index_of({"_CHECKPOINTABLE_OBJECT_GRAPH": entry_bytes(7)}), "a checkpoint of objects"),
    "partitioned": (index_of({WORDS: SLICED}), "partitioned into 2 slices, which are not joined"),
    "no dtype": (one(dtype=0), "its dtype is none"),
    "strings": (one(dtype=7), "its dtype is DT_STRING"),
    "a dtype that does not exist": (one(dtype=77), "its dtype is number 77"),
    "a dimension of 2^60": (one(shape=(2**60,)), r"F32\[1152921504606846976\] needs 4611686018427387904 bytes"),
    "elements beyond 64 bits": (one(shape=(2**60, 2**60)), "more elements than 64 bits count"),
    "the same with a zero": (one(shape=(2**60, 0, 2**60), size=0), "more elements than 64 bits count"),
    "a negative dimension": (one(shape=(-1,)), "more elements than 64 bits count"),
    "too many dimensions": (one(shape=(1,) * 33), "more than 32 dimensions"),
    "a size that is not the shape's": (one(size=12), r"F32\[2\] needs 8 bytes, the index gives it 12"),
    "an offset beyond the file": (one(offset=1), "its bytes 1 to 9 lie outside"),
    "an offset of 2^63": (one(offset=2**63), "its bytes 9223372036854775808 to .* lie outside"),
    "a data file that is none": (one(shard=1), "said to lie in data file 1 of 1"),
    "overlapping variables": (
        index_of({WORDS: entry_bytes(), DENSE: entry_bytes(shape=(1, 1), size=4, offset=4)}),
        f"the bytes of variables '{WORDS}' and '{DENSE}' overlap",
    ),
    "two variables of one name": (
        index_of({"bert/x/gamma": entry_bytes(), "bert/x/kernel": entry_bytes(shape=(0, 1), size=0)}),
        r"two variables would be 'bert\.x\.weight', one of them 'bert/x/kernel'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("index", "message"), LYING_INDICES.values(), ids=LYING_INDICES)
def test_lying_indices(tmp_path: Path, index: bytes, message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        open_checkpoint(with_index(tmp_path, index))
    assert str(tmp_path) in str(caught.value)


def test_the_index_that_the_lies_are_made_of_is_good(tmp_path: Path) -> None:
    assert open_checkpoint(with_index(tmp_path, one())).tensors.shape("bert.embeddings.word_embeddings.weight") == (2,)
    assert set(read_table(blocks_at((0, GOOD_BLOCK)))) == {b"", KEY}


def test_every_truncation_of_the_index_is_refused(tmp_path: Path) -> None:
    index = good(tmp_path).with_suffix(".ckpt.index")
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"bert_model\.ckpt\.index: "):
            open_checkpoint(tmp_path)


def test_every_changed_bit_of_the_index_is_noticed_or_harmless(tmp_path: Path) -> None:
    index = good(tmp_path).with_suffix(".ckpt.index")
    whole = index.read_bytes()
    expected = read_table(whole)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        index.write_bytes(changed)
        try:
            open_checkpoint(tmp_path)
        except CheckpointError:
            continue
        # The metaindex block, which TensorFlow does not use either, and the padding of the footer.
        assert read_table(bytes(changed)) == expected


def test_data_files_that_are_missing_cut_or_damaged(tmp_path: Path) -> None:
    prefix = good(tmp_path)
    read_all(tmp_path)
    for shard, variable in enumerate((WORDS, DENSE)):
        data = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-00002")
        whole = data.read_bytes()
        for size in range(1, len(whole)):
            data.write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match=rf"{variable}.*the file is truncated or damaged"):
                open_checkpoint(tmp_path)
        for place in range(len(whole)):
            data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=rf"{variable}.*do not have the checksum"):
                read_all(tmp_path)
        data.unlink()
        with pytest.raises(CheckpointError, match=rf"{variable}.*its file .*{shard:05d}-of-00002' is missing"):
            open_checkpoint(tmp_path)
        data.write_bytes(whole)


def test_missing_and_misshapen_variables_are_named(tmp_path: Path) -> None:
    good(tmp_path)
    with pytest.raises(CheckpointError, match=r"bert\.embeddings\.token_type_embeddings\.weight' is missing"):
        build_graph(open_checkpoint(tmp_path))
    write_bundle(tmp_path, {WORDS: np.ones((2, 5), "f4")})
    with pytest.raises(
        CheckpointError, match=r"word_embeddings\.weight' has shape \[2, 5\], the config promises \[5, 2\]"
    ):
        build_graph(open_checkpoint(tmp_path))


def shared_keys() -> bytes:
    """A block of 900 kB whose 100,000 keys, each a byte longer than the last, would need 5 GB."""
    body = b"".join(varint(index) + b"\x01\x00a" for index in range(100_000))
    return raw_block(body + struct.pack("<2I", 0, 1))


def shared_handles() -> bytes:
    """An index block whose 20 handles of empty blocks share a key of 1 MB."""
    blocks, size = sealed(block([])) * 20, len(block([]))
    index = b"\x00" + varint(1 << 20) + b"\x02" + b"k" * (1 << 20) + varint(0) + varint(size)
    for place in range(1, 20):
        handle = varint(place * (size + 5)) + varint(size)
        index += varint(1 << 20) + b"\x00" + varint(len(handle)) + handle
    index += struct.pack("<2I", 0, 1)
    footer = (varint(0) * 2 + varint(len(blocks)) + varint(len(index))).ljust(40, b"\0")
    return blocks + sealed(index) + footer + table({})[-8:]


def many_blocks() -> bytes:
    """1,001 blocks without entries, 13 bytes each with the trailer."""
    data = block([])
    places = (varint(index * (len(data) + 5)) + varint(len(data)) for index in range(1001))
    return ended(sealed(data) * 1001, [(f"{index:06d}".encode(), place) for index, place in enumerate(places)])


def many_variables() -> bytes:
    """20,001 variables whose entries are empty, in one block of 180 kB."""
    body = b"".join(b"\x00\x06\x00" + f"{index:06d}".encode() for index in range(20_001))
    return raw_block(body + struct.pack("<2I", 0, 1))


def long_shape() -> bytes:
    return index_of({WORDS: number(1, 1) + field(2, b"\x12\x00" * 1_000_000)})


def many_nodes() -> bytes:
    return saved_model(field(2, b"\x0a\x00" * 1_000_000))


def large_dimension() -> bytes:
    """A shape with as many unknown parts."""
    info = field(3, b"\x28\x00" * 1_000_000)
    return saved_model(field(5, field(1, "x") + field(2, field(1, field(1, "y") + field(2, info)))))


BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "keys": (shared_keys, "bert_model.ckpt.index", "its keys have more than 16777216 bytes"),
    "keys of the index block": (shared_handles, "bert_model.ckpt.index", "its keys have more than 16777216 bytes"),
    "blocks": (many_blocks, "bert_model.ckpt.index", "more than 1000 blocks"),
    "variables": (many_variables, "bert_model.ckpt.index", "more than 20000 entries"),
    "dimensions": (long_shape, "bert_model.ckpt.index", "more than 32 dimensions"),
    "nodes": (many_nodes, "saved_model.pb", "more than 1000000 parts"),
    "parts of a shape": (large_dimension, "saved_model.pb", "more than 1000000 parts"),
}


@pytest.mark.parametrize(("make", "name", "message"), BOMBS.values(), ids=BOMBS)
def test_small_files_cannot_ask_for_much_memory(
    tmp_path: Path, make: Callable[[], bytes], name: str, message: str
) -> None:
    good(tmp_path)
    (tmp_path / name).write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, f"{peak} bytes"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\xff" * 100, "not a SavedModel, or a damaged one"),
        (saved_model(b"\x0a\xff\x01"), "not a SavedModel, or a damaged one"),
        (saved_model(meta_graph(outputs={"logits": (1,) * 33})), "more than 32 dimensions"),
        (number(1, 1), "0 graphs"),
        (b"version https://git-lfs.github.com/spec/v1\n", "saved_model.pb: a git-lfs pointer"),
    ],
)
def test_damaged_saved_models(tmp_path: Path, data: bytes, message: str) -> None:
    good(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(data)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_checkpoint(tmp_path)


def test_a_graph_larger_than_any(tmp_path: Path) -> None:
    good(tmp_path)
    with (tmp_path / "saved_model.pb").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(CheckpointError, match="more than 67108864 bytes"):
        open_checkpoint(tmp_path)


def test_a_data_file_that_git_did_not_fetch(tmp_path: Path) -> None:
    with_index(tmp_path, one(), b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"data-00000-of-00001: a git-lfs pointer"):
        open_checkpoint(tmp_path)


def test_a_damaged_graph_beside_a_checkpoint(tmp_path: Path) -> None:
    good(tmp_path).with_suffix(".ckpt.meta").write_bytes(b"\xff" * 9)
    with pytest.raises(CheckpointError, match=r"ckpt\.meta: not a graph of TensorFlow.*remove it"):
        open_checkpoint(tmp_path)


def test_checkpoints_of_the_old_form(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-1").write_bytes(table({b"": b""}))
    with pytest.raises(CheckpointError, match=r"model\.ckpt-1: a checkpoint in one file \(V1\).*save it again"):
        open_checkpoint(tmp_path / "model.ckpt-1")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"')
    with pytest.raises(CheckpointError, match=r"names 'model\.ckpt-1', which is a checkpoint in one file \(V1\)"):
        open_checkpoint(tmp_path)


def test_a_file_of_a_checkpoint_instead_of_its_prefix(tmp_path: Path) -> None:
    prefix = good(tmp_path)
    with pytest.raises(CheckpointError, match=r"give its prefix, .*bert_model\.ckpt$"):
        open_checkpoint(f"{prefix}.index")
    with pytest.raises(CheckpointError, match="a file; give the folder"):
        open_checkpoint(f"{prefix}.data-00000-of-00002")


@pytest.mark.parametrize("name", ["../bert_model.ckpt", "/etc/passwd", "a\\0b", "a\\u0000b", "..", ""])
def test_the_file_checkpoint_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    good(tmp_path)
    (inside / "bert_config.json").write_text(CONFIG)
    (inside / "checkpoint").write_text(f'model_checkpoint_path: "{name}"')
    with pytest.raises(CheckpointError, match="inside/checkpoint: "):
        open_checkpoint(inside)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_at_random(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any outcome but an EncastError or a good result is a defect. Blocks get the checksums that their bytes have."""
    body = bytearray(
        block([(b"", header_bytes()), (KEY, entry_bytes(crc=EIGHT_CRC)), (b"cls/x", entry_bytes(shape=(0,), size=0))])
    )
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(EncastError):
        read_all(with_index(tmp_path_factory.mktemp("damage"), raw_block(bytes(body))))
