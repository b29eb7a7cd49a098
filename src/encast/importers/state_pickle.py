"""Reading the pickle of a state dict without being able to execute anything.

A pickle is a program for a stack machine that may call any importable function. Subclassing
``pickle.Unpickler`` and filtering ``find_class`` stops the calls, but leaves a hostile file
other doors: memo indices that allocate gigabytes, tuples nested so that hashing them takes
for ever. So this is a machine of our own for the few opcodes that ``torch.save`` emits. It
looks nothing up, imports nothing and calls nothing but the constructors in ``_CALLS``; every
opcode costs memory linear in the bytes it takes from the file, and dict keys are strings or
integers. Opcode semantics: ``pickletools`` of the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from encast.errors import CheckpointError
from encast.importers.files import quote

__all__ = ["Global", "StorageRef", "TensorRef", "read_state_pickle"]

PICKLE_LIMIT = 4 << 20
"""Bytes of the pickle; real ones have about 200 bytes a tensor."""

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


@dataclass(frozen=True)
class Global:
    """A name that the pickle refers to; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class StorageRef:
    """An entry ``data/KEY`` of the archive: ``count`` elements of a dtype."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True)
class TensorRef:
    """A strided view of a storage; offset and strides in elements, not yet validated against it."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Where a run of operands starts on the stack."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor(args: tuple[Any, ...]) -> TensorRef | None:
    if len(args) < 4 or not isinstance(args[0], StorageRef) or not _is_count(args[1]):
        return None
    shape, strides = args[2], args[3]
    for dims in (shape, strides):
        if not isinstance(dims, tuple) or len(dims) > 32 or not all(_is_count(dim) for dim in dims):
            return None
    return TensorRef(args[0], args[1], shape, strides) if len(shape) == len(strides) else None


def _parameter(args: tuple[Any, ...]) -> TensorRef | None:
    return args[0] if args and isinstance(args[0], TensorRef) else None


def _ordered_dict(args: tuple[Any, ...]) -> dict[Any, Any] | None:
    return {} if args == () else None


def _size(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else None


_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
"""The only callables of a state dict, each replaced by a constructor of ours that gives None on bad arguments."""


def read_state_pickle(data: bytes, where: str) -> Any:
    """The value of a pickle: dicts, lists, tuples, plain values and ``TensorRef``s.

    Raises ``CheckpointError`` on opcodes, names or arguments that no state dict needs. Nested values may
    be shared or cyclic; callers must not walk them without a bound.
    """
    if len(data) > PICKLE_LIMIT:
        raise CheckpointError(f"{where}: a pickle of {len(data)} bytes; state dicts need less than {PICKLE_LIMIT}")
    return _Machine(data, where).run()


class _Machine:
    def __init__(self, data: bytes, where: str) -> None:
        self._data = data
        self._where = where
        self._position = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        try:
            while True:
                opcode = self._take(1)
                if opcode == b".":
                    break
                step = _STEPS.get(opcode)
                if step is None:
                    raise self._error(f"opcode 0x{opcode.hex()}, which no state dict needs")
                step(self)
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError):
            raise self._error("a malformed pickle") from None
        if len(self._stack) != 1 or isinstance(self._stack[0], _Mark):
            raise self._error("a malformed pickle")
        return self._stack[0]

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: {what} (at byte {self._position} of the pickle); only a plain dict of tensors is read, "
            "so save model.state_dict(), better as safetensors"
        )

    def _take(self, count: int) -> bytes:
        taken = self._data[self._position : self._position + count]
        if len(taken) != count:
            raise self._error("a pickle that ends early")
        self._position += count
        return taken

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position, self._position + 1024)
        if end < 0:
            raise self._error("a name without an end")
        line = self._data[self._position : end].decode("utf-8")
        self._position = end + 1
        return line

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if isinstance(value, _Mark):
            raise self._error("a malformed pickle")
        return value

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[index], _Mark):
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise self._error("a malformed pickle")

    def _top(self, kind: type) -> Any:
        value = self._stack[-1]
        if not isinstance(value, kind):
            raise self._error("a malformed pickle")
        return value

    # Steps that do more than push

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._error("a malformed pickle")
        self._push(Global(module, name))

    def _stack_global(self) -> None:
        name = self._pop()
        self._global(self._pop(), name)

    def _set_items(self, pairs: list[Any]) -> None:
        table = self._top(dict)
        if len(pairs) % 2:
            raise self._error("a malformed pickle")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, (str, int)):
                raise self._error(f"a dict key of type {type(key).__name__}")
            table[key] = value

    def _set_item(self) -> None:
        value = self._pop()
        self._set_items([self._pop(), value])

    def _dict_of_mark(self) -> None:
        pairs = self._pop_to_mark()
        self._push({})
        self._set_items(pairs)

    def _append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _appends(self) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def _tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise self._error("a call of something that is not a name")
        call = _CALLS.get(str(function))
        if call is None:
            raise self._error(f"a call of {quote(str(function))}, which is not among {', '.join(sorted(_CALLS))}")
        value = call(args)
        if value is None:
            raise self._error(f"a call of {function} with arguments that it does not take")
        self._push(value)

    def _build(self) -> None:
        # A state dict carries its `_metadata` as the state of an OrderedDict; it plays no part in inference.
        self._pop()
        self._top(dict)

    def _persistent(self) -> None:
        value = self._pop()
        if (
            not isinstance(value, tuple)
            or len(value) not in (5, 6)
            or value[0] != "storage"
            or not isinstance(value[1], Global)
            or not isinstance(value[2], str)
            or not _is_count(value[4])
            or value[5:] not in ((), (None,))
        ):
            raise self._error("a reference to a storage that is not understood")
        dtype = STORAGE_DTYPES.get(value[1].name) if value[1].module in ("torch", "torch.cuda") else None
        if dtype is None:
            raise self._error(f"a storage of type {quote(str(value[1]))}; known are {', '.join(STORAGE_DTYPES)}")
        self._push(StorageRef(value[2], dtype, value[4]))

    def _long(self, size: int) -> None:
        # State dicts hold sizes; anything longer only serves to make later arithmetic slow.
        if not 0 <= size <= 16:
            raise self._error(f"an integer of {size} bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True))


_STEPS: dict[bytes, Callable[[_Machine], object]] = {
    b"\x80": lambda m: m._take(1),  # PROTO
    b"\x95": lambda m: m._take(8),  # FRAME
    b"(": lambda m: m._push(_Mark()),
    b"0": lambda m: m._pop(),  # POP
    b"1": lambda m: m._pop_to_mark(),  # POP_MARK
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(m._number("<i")),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"\x8a": lambda m: m._long(m._number("<B")),
    b"\x8b": lambda m: m._long(m._number("<i")),
    b"G": lambda m: m._push(m._number(">d")),
    b"X": lambda m: m._push(m._take(m._number("<I")).decode("utf-8")),
    b"\x8c": lambda m: m._push(m._take(m._number("<B")).decode("utf-8")),
    b"\x8d": lambda m: m._push(m._take(m._number("<Q")).decode("utf-8")),
    b"T": lambda m: m._push(m._take(m._number("<I")).decode("utf-8")),  # BINSTRING, of Python 2
    b"U": lambda m: m._push(m._take(m._number("<B")).decode("utf-8")),  # SHORT_BINSTRING
    b"]": lambda m: m._push([]),
    b"a": _Machine._append,
    b"e": _Machine._appends,
    b"l": lambda m: m._push(m._pop_to_mark()),
    b")": lambda m: m._push(()),
    b"t": lambda m: m._push(tuple(m._pop_to_mark())),
    b"\x85": lambda m: m._tuple_of(1),
    b"\x86": lambda m: m._tuple_of(2),
    b"\x87": lambda m: m._tuple_of(3),
    b"}": lambda m: m._push({}),
    b"d": _Machine._dict_of_mark,
    b"s": _Machine._set_item,
    b"u": lambda m: m._set_items(m._pop_to_mark()),
    b"h": lambda m: m._push(m._memo[m._number("<B")]),
    b"j": lambda m: m._push(m._memo[m._number("<I")]),
    b"q": lambda m: m._memo.__setitem__(m._number("<B"), m._top(object)),
    b"r": lambda m: m._memo.__setitem__(m._number("<I"), m._top(object)),
    b"\x94": lambda m: m._memo.__setitem__(len(m._memo), m._top(object)),  # MEMOIZE
    b"c": lambda m: m._global(m._line(), m._line()),
    b"\x93": _Machine._stack_global,
    b"R": _Machine._reduce,
    b"b": _Machine._build,
    b"Q": _Machine._persistent,
}
