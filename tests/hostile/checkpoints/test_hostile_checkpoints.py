"""Each way in which a checkpoint can lie ends in a CheckpointError that says what is wrong and where."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encast.errors import CheckpointError, EncastError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.model_files import read_tensors
from encast.importers.safetensors_file import parse_header
from encast.importers.state_pickle import TensorRef, read_state_pickle


def write(folder: Path, data: bytes, name: str = "model.safetensors") -> Folder:
    (folder / name).write_bytes(data)
    return Folder(folder)


def with_header(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    shape, offsets = (list(each) if isinstance(each, tuple) else each for each in (shape, offsets))
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
DEEP = b"[" * 200_000

LYING_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "the file is empty"),
    "shorter than its length field": (b"\x01\x02", "starts with 8 bytes"),
    "only a length": (struct.pack("<Q", 10), "10 bytes, but 0 follow"),
    "header longer than the file": (with_header({}, length=1000), "1000 bytes, but 2 follow"),
    "header of 2^63 bytes": (with_header({}, length=2**63), "the format allows 100000000"),
    "header of 2^64 - 1 bytes": (with_header({}, length=2**64 - 1), "the format allows 100000000"),
    "header of no bytes": (with_header(b""), "does not start with"),
    "header cut short by its length": (with_header({"w": tensor()}, EIGHT, length=10), "not JSON at line 1"),
    "not UTF-8": (with_header(b'{"\xff": 1}'), "not UTF-8 at byte 2"),
    "not JSON": (with_header(b"{nope"), "not JSON at line 1, column 2"),
    "a list": (with_header(b"[]"), "does not start with"),
    "spaces first": (with_header(b" {}"), "does not start with"),
    "nested deeply": (with_header(b'{"w":' + DEEP), "nested too deeply"),
    "a number of 10,000 digits": (with_header(b'{"w":' + b"9" * 10_000 + b"}"), "digits|exactly"),
    "NaN": (with_header(b'{"w": NaN}'), "NaN is not JSON"),
    "a key twice": (
        with_header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32"}}', EIGHT),
        "the key 'w' stands twice",
    ),
    "metadata that is no object": (with_header({"__metadata__": [1]}), "__metadata__ must be"),
    "metadata that is no string": (with_header({"__metadata__": {"a": 1}}), "__metadata__ must be"),
    "entry that is no object": (with_header({"w": 3}), "'w': its entry must be an object of exactly"),
    "entry without shape": (with_header({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT), "exactly"),
    "entry with more fields": (with_header({"w": {**tensor(), "x": 1}}, EIGHT), "exactly"),
    "unknown dtype": (with_header({"w": tensor("F33")}, EIGHT), "unknown dtype 'F33'; known are F64"),
    "dtype that is no string": (with_header({"w": tensor(32)}, EIGHT), "unknown dtype a value of type int"),
    "negative dimension": (with_header({"w": tensor(shape=(-2,))}, EIGHT), "integers from 0"),
    "two negative dimensions": (with_header({"w": tensor(shape=(-1, -2))}, EIGHT), "integers from 0"),
    "huge dimension": (with_header({"w": tensor(shape=(2**63,))}, EIGHT), "integers from 0"),
    "dimension that is no integer": (with_header({"w": tensor(shape=(2.0,))}, EIGHT), "integers from 0"),
    "dimension true": (with_header({"w": tensor(shape=(True, 2))}, EIGHT), "integers from 0"),
    "shape that is no list": (with_header({"w": tensor(shape="2")}, EIGHT), "integers from 0"),
    "rank of 1000": (with_header({"w": tensor(shape=(1,) * 1000)}, EIGHT), "at most 32"),
    "size that overflows 64 bits to 8": (
        with_header({"w": tensor(shape=(2**62 + 2, 4))}, EIGHT),
        "more elements than 64 bits count",
    ),
    "zero times huge": (with_header({"w": tensor(shape=(0, 2**62, 2**62), offsets=(0, 0))}), "64 bits"),
    "size below the range": (with_header({"w": tensor(shape=(1,))}, EIGHT), "needs 4 bytes, its range has 8"),
    "size above the range": (with_header({"w": tensor(shape=(3,))}, EIGHT), "needs 12 bytes, its range has 8"),
    "range backwards": (with_header({"w": tensor(offsets=(8, 0))}, EIGHT), "8 to 0 run backwards"),
    "negative range": (with_header({"w": tensor(offsets=(-8, 0))}, EIGHT), "data_offsets must be two integers"),
    "one offset": (with_header({"w": tensor(offsets=(0,))}, EIGHT), "data_offsets must be two integers"),
    "range outside": (with_header({"w": tensor(offsets=(8, 16))}, EIGHT), "8 to 16 lie outside of the 8"),
    "truncated data": (with_header({"w": tensor()}, EIGHT[:7]), "0 to 8 lie outside of the 7.*truncated"),
    "overlap": (
        with_header({"a": tensor(), "b": tensor(offsets=(4, 12))}, bytes(12)),
        "tensors 'a' and 'b' overlap",
    ),
    "one range twice": (with_header({"a": tensor(), "b": tensor()}, EIGHT), "tensors 'a' and 'b' overlap"),
    "hole at the start": (with_header({"w": tensor(offsets=(8, 16))}, bytes(16)), "bytes 0 to 8, before tensor 'w'"),
    "hole between": (
        with_header({"a": tensor(), "b": tensor(offsets=(12, 20))}, bytes(20)),
        "bytes 8 to 12, before tensor 'b'",
    ),
    "data that no tensor has": (with_header({"w": tensor()}, bytes(9)), "the last 1 bytes belong to no tensor"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
    "a name of a megabyte": (with_header({"w" * 1_000_000: tensor("F33")}, EIGHT), r"'w{120}'\.\.\."),
    "a lone surrogate in a name": (with_header(b'{"\\ud800": 3}'), r"'\\ud800'"),
}


@pytest.mark.parametrize("case", LYING_SAFETENSORS)
def test_lying_safetensors(tmp_path: Path, case: str) -> None:
    data, message = LYING_SAFETENSORS[case]
    folder = write(tmp_path, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_tensors(folder)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert len(str(caught.value)) < 2000
    str(caught.value).encode()  # printable: no lone surrogates


# The index of shards

SHARD = files.safetensors_bytes({"a": np.ones(2, np.float32)})

LYING_INDEXES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "a list": (b"[]", "holds a list; a JSON object is needed"),
    "no weight_map": (b"{}", "weight_map must be an object"),
    "empty weight_map": (b'{"weight_map": {}}', "weight_map must be an object"),
    "weight_map of lists": (b'{"weight_map": {"a": ["s"]}}', "'a' is said to lie in a value of type list"),
    "path out": (b'{"weight_map": {"a": "../model.safetensors"}}', r"lie in '\.\./model\.safetensors'"),
    "absolute path": (b'{"weight_map": {"a": "/etc/passwd"}}', "lie in '/etc/passwd'"),
    "backslash": (b'{"weight_map": {"a": "..\\\\x"}}', "name of a file in the same folder"),
    "the folder itself": (b'{"weight_map": {"a": "."}}', "name of a file in the same folder"),
    "NUL": (b'{"weight_map": {"a": "s\\u0000"}}', "name of a file in the same folder"),
    "missing shard": (b'{"weight_map": {"a": "absent.safetensors"}}', "'absent.safetensors' is missing"),
    "tensor that its shard lacks": (b'{"weight_map": {"b": "s"}}', "'s' lacks tensor 'b'"),
    "tensor that it does not list": (b'{"weight_map": {"a": "two"}}', "holds tensor 'b', which the index does not"),
    "shard that is a folder": (b'{"weight_map": {"a": "dir"}}', "not a regular file"),
}


@pytest.mark.parametrize("case", LYING_INDEXES)
def test_lying_indexes(tmp_path: Path, case: str) -> None:
    index, message = LYING_INDEXES[case]
    (tmp_path / "s").write_bytes(SHARD)
    (tmp_path / "two").write_bytes(files.safetensors_bytes({"a": np.ones(2, "f4"), "b": np.ones(2, "f4")}))
    (tmp_path / "dir").mkdir()
    folder = write(tmp_path, index, "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=message):
        read_tensors(folder)


# torch archives

STORAGE = np.arange(4, dtype=np.float32).tobytes()


def strided(offset: int, shape: list[int], strides: list[int], *, count: int = 4, **options: Any) -> bytes:
    opcodes = files.tensor_opcodes("FloatStorage", "0", count, offset, shape, strides, **options)
    return bytes(files.torch_zip(pickle=files.state_pickle({"w": opcodes}), storages={"0": STORAGE}))


def archive(**entries: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in entries.items():
            file.writestr(name.replace("__", "/").replace("_pkl", ".pkl"), content)
    return out.getvalue()


WHOLE = files.torch_zip({"w": np.arange(4, dtype=np.float32)})


def patched(old: bytes, new: bytes) -> bytes:
    assert WHOLE.count(old) >= 1
    return bytes(WHOLE.replace(old, new))


LYING_ARCHIVES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "the file is empty"),
    "pickle of torch before 1.6": (pickle.dumps(0x1950A86A20F9469CFC6C, 2), "torch before 1.6"),
    "tar of the oldest torch": (b"sys_info".ljust(512, b"\0"), "torch before 1.6"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
    "directory cut off": (WHOLE[:-30], "truncated"),
    "only a local header": (WHOLE[:40], "truncated"),
    "another archive": (archive(hello=b"x"), "not one of torch.save"),
    "two pickles": (archive(a__data_pkl=b".", b__data_pkl=b"."), "2 data.pkl"),
    "compressed": (files.torch_zip({"w": np.zeros(999, "f4")}, compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "big-endian": (files.torch_zip({"w": np.ones(2, "f4")}, extra={"byteorder": b"big"}), "little-endian"),
    "storage missing": (files.torch_zip(pickle=files.state_pickle({"w": files.tensor_opcodes(
        "FloatStorage", "9", 4, 0, [4], [1])})), "lacks its storage '9'"),
    "storage shorter than said": (strided(0, [4], [1], count=5), "16 bytes, 5 elements of F32 need 20"),
    "storage longer than said": (strided(0, [3], [1], count=3), "16 bytes, 3 elements"),
    "offset outside": (strided(4, [1], [1]), "does not fit its storage of 4"),
    "shape outside": (strided(0, [5], [1]), "does not fit its storage of 4"),
    "stride outside": (strided(0, [2, 2], [3, 1]), "does not fit its storage of 4"),
    "stride of 2^62": (strided(0, [2], [2**62]), "does not fit its storage of 4"),
    "repeated a billion times": (strided(0, [2**30], [0]), "does not fit its storage of 4"),
    "zero times huge": (strided(0, [0, 2**40, 2**40], [1, 1, 1]), "does not fit its storage of 4"),
    "negative shape": (strided(0, [-1], [1]), "arguments that it does not take"),
    "more strides than dimensions": (strided(0, [2], [1, 1]), "arguments that it does not take"),
    "storage of another module": (strided(0, [4], [1], module="os"), r"a storage of type 'os\.FloatStorage'"),
    "entry beyond the end": (
        patched(b"\x10\0\0\0" * 2, b"\xff\xff\0\0" * 2), "reaches beyond the end of the file"),
    "local header elsewhere": (patched(b"PK\x03\x04", b"PK\x03\x05")[:0] + b"PK\x03\x04" + WHOLE[4:].replace(
        b"PK\x03\x04", b"PK\x03\x05"), "not where the directory says"),
}  # fmt: skip


@pytest.mark.parametrize("case", LYING_ARCHIVES)
def test_lying_archives(tmp_path: Path, case: str) -> None:
    data, message = LYING_ARCHIVES[case]
    folder = write(tmp_path, data, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_tensors(folder)
    assert str(tmp_path / "pytorch_model.bin") in str(caught.value)


def test_zip_directory_that_claims_too_many_entries(tmp_path: Path) -> None:
    end = WHOLE.rfind(b"PK\x05\x06")
    data = WHOLE[:end] + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 0, 0)
    with pytest.raises(CheckpointError, match="does not fit the file"):
        read_tensors(write(tmp_path, data, "pytorch_model.bin"))


# Pickles that want to be executed


class Attack:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def attacks(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    objects = {
        "os.system": Attack(os.system, command),
        "eval": Attack(eval, f"open({str(marker)!r}, 'w')"),
        "open": Attack(open, str(marker), "w"),
        "getattr": Attack(getattr, "a", "upper"),
        "inside a dict": {"w": Attack(os.system, command)},
    }
    made = {f"{name}, protocol {p}": pickle.dumps(value, p) for name, value in objects.items() for p in range(6)}
    made["INST"] = b"(S'" + command.encode() + b"'\nios\nsystem\n."
    made["OBJ"] = b"(cos\nsystem\nX" + struct.pack("<I", len(command)) + command.encode() + b"o."
    made["NEWOBJ"] = b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(command)) + command.encode() + b"\x85\x81."
    made["EXT1"] = b"\x80\x02\x82\x01."
    made["dotted name"] = b"\x80\x04\x8c\x0bcollections\x8c\x17OrderedDict.__class__.x\x93)R."
    made["BUILD on a name"] = b"\x80\x02cos\nsystem\n}b."
    made["BUILD with slots on a tensor"] = (
        files.tensor_opcodes("FloatStorage", "0", 4, 0, [4], [1]) + b"N}X\x01\x00\x00\x00aK\x01s\x86b."
    )
    made["call of a call"] = b"\x80\x02ccollections\nOrderedDict\n)R)R."
    return made


def test_no_attack_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for name, data in attacks(marker).items():
        for wrapped in (data, files.state_pickle({"w": data.removesuffix(b".")})):
            folder = write(tmp_path, files.torch_zip(pickle=wrapped), "pytorch_model.bin")
            with pytest.raises(CheckpointError):
                read_tensors(folder)
            assert not marker.exists(), name


def test_refused_names_are_told() -> None:
    with pytest.raises(
        CheckpointError, match=r"a call of '(posix|nt)\.system', which is not among collections\.OrderedDict"
    ):
        read_state_pickle(pickle.dumps(Attack(os.system, "true"), 2), "x.bin")


def nested_tuples(depth: int) -> bytes:
    """A tuple whose hash takes 2^depth steps: every level holds the one below twice."""
    return b"\x80\x02)" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(depth))


BOMBS: dict[str, Callable[[], bytes]] = {
    "memo index of 2^32 - 1": lambda: b"\x80\x02Nr\xff\xff\xff\xff" + b"0" + b"K\x01" + b".",
    "string of 2^64 - 1 bytes": lambda: b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "string of 2^32 - 1 bytes": lambda: b"\x80\x02X" + b"\xff" * 4 + b".",
    "long of 2^31 - 1 bytes": lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "negative long": lambda: b"\x80\x02\x8b\xff\xff\xff\xff.",
    "long of 255 bytes": lambda: b"\x80\x02\x8a\xff" + bytes(255) + b".",
    "frame of 2^64 - 1 bytes": lambda: b"\x80\x04\x95" + b"\xff" * 8 + b"N0.",
    "tuple that takes for ever to hash": lambda: nested_tuples(200) + b"}q\xff0h\xff" + b".",
    "such a tuple as key": lambda: b"\x80\x02}" + nested_tuples(200)[2:] + b"Ns.",
    "such a tuple as shape": lambda: b"ctorch\nSize\n" + nested_tuples(200)[2:] + b"\x85R.",
    "such a tuple as storage": lambda: nested_tuples(200) + b"Q.",
    "marks without end": lambda: b"(" * 1_000_000 + b".",
    "deep lists": lambda: b"]" * 500_000 + b"a" * 499_999 + b".",
    "deep tuples": lambda: b")" + b"\x85" * 1_000_000 + b".",
    "list in itself": lambda: b"\x80\x02]q\x00h\x00a.",
    "empty": lambda: b"",
    "nothing on the stack": lambda: b"\x80\x02.",
    "two values": lambda: b"NN.",
    "a mark alone": lambda: b"(.",
    "pop of nothing": lambda: b"0.",
    "unknown memo": lambda: b"h\x07.",
    "reduce of a mark": lambda: b"(R.",
    "setitem on a tuple": lambda: b")NNs.",
    "odd items": lambda: b"}(Nu.",
    "name without end": lambda: b"c" + b"a" * 5000 + b".",
    "not UTF-8": lambda: b"X\x01\x00\x00\x00\xff.",
    "too long": lambda: b"N0" * (3 << 20) + b"N.",
}


@pytest.mark.parametrize("case", BOMBS)
def test_pickle_bombs(tmp_path: Path, case: str) -> None:
    folder = write(tmp_path, files.torch_zip(pickle=BOMBS[case]()), "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        read_tensors(folder)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("long of 255 bytes", "an integer of 255 bytes"),
        ("negative long", "an integer of -1 bytes"),
        ("string of 2^64 - 1 bytes", "ends early"),
        ("such a tuple as key", "a dict key of type tuple"),
        ("name without end", "a name without an end"),
        ("too long", "less than 4194304"),
        ("unknown memo", "malformed"),
        ("odd items", "malformed"),
    ],
)
def test_pickle_bombs_are_told_apart(case: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_state_pickle(BOMBS[case](), "x.bin")


# Folders and configuration


def model(folder: Path) -> Path:
    files.write_model(folder)
    return folder


def _config(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_bytes(content)


def _replace_by(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "empty config.json": (_config(b""), "config.json: the file is empty"),
    "config.json is a list": (_config(b"[1]"), "holds a list; a JSON object is needed"),
    "config.json is a number": (_config(b"1"), "holds a int; a JSON object is needed"),
    "config.json is not JSON": (_config(b"{'a': 1}"), "not JSON at line 1, column 2"),
    "config.json is not UTF-8": (_config(b'{"a": "\xe9"}'), "not UTF-8 at byte 7"),
    "config.json has a key twice": (_config(b'{"hidden_size": 3, "hidden_size": 4}'), "'hidden_size' stands twice"),
    "config.json is nested deeply": (_config(b'{"a":' + DEEP), "nested too deeply"),
    "config.json has NaN": (_config(b'{"layer_norm_eps": NaN}'), "NaN is not JSON"),
    "config.json has infinity": (_config(b'{"layer_norm_eps": -Infinity}'), "-Infinity is not JSON"),
    "config.json has a huge number": (_config(b'{"a": ' + b"1" * 9999 + b"}"), "config.json: .*digits"),
    "config.json is too long": (_config(b'{"a": "' + b"x" * (65 << 20) + b'"}'), "more than 67108864 bytes"),
    "architectures is a string": (_config(b'{"architectures": "BertModel"}'), "architectures must be a list"),
    "config.json is a folder": (_replace_by("config.json", Path.mkdir), "not a regular file"),
    "config.json is a pipe": (_replace_by("config.json", os.mkfifo), "not a regular file"),
    "config.json is a dangling link": (
        _replace_by("config.json", lambda path: path.symlink_to("../blobs/1")),
        "a link to .*blobs/1, which does not exist",
    ),
    "config.json links to itself": (_replace_by("config.json", lambda path: path.symlink_to(path)), "cannot be opened"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no weights; accepted are model.safetensors",
    ),
    "weights of TensorFlow that are none": (
        lambda folder: (folder / "model.safetensors").rename(folder / "tf_model.h5"),
        r"tf_model\.h5: does not begin as HDF5 does",
    ),
    "weights of Flax": (
        lambda folder: (folder / "model.safetensors").rename(folder / "flax_model.msgpack"),
        r"flax_model\.msgpack \(Flax\), which is not read",
    ),
    "weights are a pipe": (_replace_by("model.safetensors", os.mkfifo), "not a regular file"),
    "weights are a folder": (_replace_by("model.safetensors", Path.mkdir), "not a regular file"),
    "modules.json is an object": (lambda folder: (folder / "modules.json").write_text("{}"), "a JSON array is needed"),
    "modules.json holds numbers": (lambda folder: (folder / "modules.json").write_text("[1]"), "module 0 must be"),
}


@pytest.mark.parametrize("case", BROKEN_FOLDERS)
def test_broken_folders(tmp_path: Path, case: str) -> None:
    change, message = BROKEN_FOLDERS[case]
    change(model(tmp_path))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a file; give the folder"):
        open_checkpoint(model(tmp_path) / "model.safetensors")


def test_an_adapter_instead_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="PEFT adapter; merge it"):
        open_checkpoint(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; a folder in the Hugging Face layout"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", [".", "config.json", "model.safetensors"])
def test_without_permission(tmp_path: Path, name: str) -> None:
    model(tmp_path)
    (tmp_path / name).chmod(0)
    try:
        with pytest.raises(CheckpointError, match="permission"):
            open_checkpoint(tmp_path)
    finally:
        (tmp_path / name).chmod(0o700)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_permission_errors_are_explained(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path)
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("encast.importers.files.os.stat", stat)
    with pytest.raises(CheckpointError, match=f"{name}: cannot be opened .Permission denied.; check its permissions"):
        open_checkpoint(tmp_path)


# Damage at random: any outcome but an EncastError or a good result is a defect


def read_all(folder: Folder) -> None:
    tensors = read_tensors(folder)
    for name in tensors:
        if tensors.dtype(name) in ("F32", "F16", "BF16", "F64"):
            tensors.f32(name)


WHOLE_FILES = {
    "model.safetensors": files.safetensors_bytes(
        {"w": np.ones((3, 2), "f4"), "h": np.ones(4, "f2"), "i": np.arange(3)}
    ),
    "pytorch_model.bin": files.torch_zip({"w": np.ones((3, 2), "f4"), "h": np.ones(4, "f2"), "i": np.arange(3)}),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_every_truncation_is_refused(tmp_path: Path, name: str) -> None:
    whole = WHOLE_FILES[name]
    read_all(write(tmp_path, whole, name))
    for size in range(len(whole)):
        if name.endswith(".bin") and size >= whole.rfind(b"PK\x05\x06") + 22:
            continue
        with pytest.raises(CheckpointError):
            read_all(write(tmp_path, whole[:size], name))


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_flipped_bits_are_refused_or_harmless(tmp_path: Path, name: str) -> None:
    whole = WHOLE_FILES[name]
    refused = 0
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position * 5 % 8
        try:
            read_all(write(tmp_path, bytes(data), name))
        except EncastError:
            refused += 1
    assert refused > len(whole) // 4


@settings(max_examples=300)
@given(header=st.binary(max_size=200), size=st.integers(0, 64))
def test_random_headers(header: bytes, size: int) -> None:
    with pytest.raises(CheckpointError):
        parse_header(b"{" + header.replace(b"}", b""), size, "fuzz")


NUMBERS = st.one_of(st.integers(-3, 20), st.integers(2**31, 2**65), st.floats(), st.booleans(), st.none())
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "F33", "", 3]),
        "shape": st.lists(NUMBERS, max_size=4) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
    }
)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(header=st.dictionaries(st.text(max_size=3), ENTRIES | NUMBERS, max_size=4), size=st.integers(0, 64))
def test_headers_of_plausible_entries(header: dict[str, Any], size: int) -> None:
    """What is accepted covers the data exactly, entry by entry."""
    try:
        tensors = parse_header(json.dumps(header).encode(), size, "fuzz")
    except CheckpointError:
        return
    assert set(tensors) == set(header) - {"__metadata__"}
    assert sum(header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in tensors) == size


OPCODES = st.sampled_from(
    [bytes([code]) for code in range(256)]
    + [
        b"K\x01",
        b"K\x02",
        b"X\x01\x00\x00\x00a",
        b"h\x00",
        b"q\x00",
        b")",
        b"}",
        b"]",
        b"(",
        b"t",
        b"u",
        b"R",
        b"b",
        b"Q",
    ]
    + [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n", b"ctorch\nSize\n"]
    + [files.tensor_opcodes("FloatStorage", "0", 4, 0, [4], [1])]
)


@settings(max_examples=1000)
@given(parts=st.lists(OPCODES, max_size=40))
def test_random_programs(parts: list[bytes]) -> None:
    """A program of random opcodes gives plain data or a CheckpointError."""
    try:
        value = read_state_pickle(b"".join(parts) + b".", "fuzz")
    except CheckpointError:
        return
    plain = (dict, list, tuple, str, int, float, bool, type(None), TensorRef)
    assert isinstance(value, plain) or type(value).__module__.startswith("encast.")


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner)


SCALARS = st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats() | st.text()


@settings(max_examples=300)
@given(value=st.recursive(SCALARS, containers), protocol=st.integers(2, 5))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert repr(read_state_pickle(pickle.dumps(value, protocol), "fuzz")) == repr(value)
