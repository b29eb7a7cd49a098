"""What every backend offers, and what it says of a request that it cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np

from encast.batch import Batch, Int32
from encast.errors import InputError
from encast.ir.types import ValueType

__all__ = ["Float32", "Limits", "Runnable", "SideBySide", "check_request"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]


@runtime_checkable
class Runnable(Protocol):
    """A model that computes one of its outputs for a packed batch."""

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """The output of that public name, f32, with the rows that its type says.

        ``select: i32[selected]`` holds indices of tokens in the batch and is needed exactly for outputs
        whose rows are ``selected``. Raises ``InputError`` for a request that cannot be served, in the words of
        ``check_request``: callers need not check it before.
        """
        ...

    def close(self) -> None:
        """Frees threads and memory that would outlast the object; it runs nothing afterwards."""
        ...


class SideBySide:
    """Of a ``Runnable`` that computes several runs of one call at once. ``at_once``: so many keep it busy."""

    at_once: int

    def begin(self, output: str, batch: Batch, select: Int32 | None = None) -> Future[Float32]:
        """As ``Runnable.run``, without waiting for the answer."""
        raise NotImplementedError


class Limits(Protocol):
    """What a model takes: ids below ``vocab``, token types below ``type_vocab`` (0: none), ``max_len`` tokens."""

    @property
    def vocab(self) -> int: ...

    @property
    def type_vocab(self) -> int: ...

    @property
    def max_len(self) -> int: ...


def check_request(
    limits: Limits,
    outputs: Mapping[str, ValueType],
    output: str,
    batch: Batch,
    select: Int32 | None = None,
) -> None:
    """Raises ``InputError`` unless the model can serve the request.

    ``limits`` are ``Graph.meta``'s, ``outputs`` the types of the public outputs.
    """
    if output not in outputs:
        raise InputError(f"the model has no output {output!r}; it has {sorted(outputs)}")
    _check_layout(batch)
    _check_range("token_ids", batch.token_ids, limits.vocab, batch)
    if batch.token_type_ids is not None:
        if batch.token_type_ids.shape != batch.token_ids.shape:
            raise InputError(
                f"token_type_ids has shape {batch.token_type_ids.shape}, token_ids {batch.token_ids.shape}; "
                "give one token type for every token"
            )
        _check_range("token_type_ids", batch.token_type_ids, max(limits.type_vocab, 1), batch)
    lengths = np.diff(batch.cu_seqlens)
    if lengths.size and lengths.max() > limits.max_len:
        index = int(lengths.argmax())
        raise InputError(
            f"sequence {index} has {lengths[index]} tokens; the model takes at most {limits.max_len}: "
            "truncate it or split it into windows"
        )
    _check_select(outputs[output], output, batch, select)


def _check_layout(batch: Batch) -> None:
    for name, array in (("token_ids", batch.token_ids), ("cu_seqlens", batch.cu_seqlens)):
        if array.ndim != 1 or array.dtype != np.int32:
            raise InputError(f"{name} is {array.dtype}{list(array.shape)}; a vector of int32 is needed")
    cu_seqlens = batch.cu_seqlens
    if cu_seqlens.size < 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != batch.tokens:
        raise InputError(
            f"cu_seqlens must rise from 0 to the number of tokens ({batch.tokens}); it is "
            f"{cu_seqlens[:3].tolist()} ... {cu_seqlens[-1:].tolist()}"
        )
    rises = cu_seqlens[1:] > cu_seqlens[:-1]
    if not rises.all():
        index = int(rises.argmin())
        raise InputError(f"cu_seqlens does not rise at sequence {index}; every sequence needs at least one token")


def _check_range(name: str, ids: Int32, size: int, batch: Batch) -> None:
    if ids.dtype != np.int32:
        raise InputError(f"{name} is {ids.dtype}; int32 is needed")
    unsigned = ids.view(np.uint32)  # negative ids are large ones
    if unsigned.size and unsigned.max() >= size:
        token = int((unsigned >= size).argmax())
        sequence = int(np.searchsorted(batch.cu_seqlens, token, side="right")) - 1
        place = f"token {token - int(batch.cu_seqlens[sequence])} of sequence {sequence}"
        raise InputError(f"{name}[{token}] ({place}) is {ids[token]}; the model takes 0 to {size - 1}")


def _check_select(type: ValueType, output: str, batch: Batch, select: Int32 | None) -> None:
    if type.shape[0] != "selected":
        if select is not None:
            raise InputError(f"select was given, but output {output!r} is {type} and does not read it; leave it out")
        return
    if select is None:
        raise InputError(f"output {output!r} is {type}: give select, the indices of the tokens that it is wanted for")
    if select.ndim != 1 or select.dtype != np.int32:
        raise InputError(f"select is {select.dtype}{list(select.shape)}; a vector of int32 is needed")
    wrong = np.flatnonzero((select < 0) | (select >= batch.tokens))
    if wrong.size:
        raise InputError(f"select[{wrong[0]}] is {select[wrong[0]]}; the batch has tokens 0 to {batch.tokens - 1}")
