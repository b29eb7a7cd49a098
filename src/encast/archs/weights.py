"""Access to a checkpoint's tensors that notices what is missing, misshapen and left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from encast.errors import CheckpointError

__all__ = ["TensorSource", "Weights"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]

_OLD_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
# Buffers that older releases of transformers wrote beside the weights; they hold 0, 1, 2, ...
_BUFFERS = r"(.*\.)?embeddings\.(position_ids|token_type_ids)"


class TensorSource(Protocol):
    """The part of ``importers``' tensors that architectures read."""

    def __contains__(self, name: object, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str, /) -> Sequence[int]: ...

    def f32(self, name: str, /) -> Float32: ...


class Weights:
    """A checkpoint's tensors, with a record of which ones were used."""

    def __init__(self, tensors: TensorSource, where: str) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Float32:
        """The tensor of that name; raises ``CheckpointError`` when it is missing or has another shape.

        Layer norms may have their names of 2018 (``gamma``, ``beta``).
        """
        stored = self._stored_name(name)
        if stored not in self._tensors:
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is missing; the config promises it with shape {list(shape)}"
                + self._hint(name)
            )
        found = tuple(self._tensors.shape(stored))
        if found != shape:
            raise CheckpointError(
                f"{self.where}: tensor {stored!r} has shape {list(found)}, the config promises {list(shape)}; "
                "config and weights are not of the same model"
            )
        self._used.add(stored)
        return self._tensors.f32(stored)

    def any_below(self, path: str) -> bool:
        """Whether a tensor's name begins with ``path``."""
        return any(name.startswith(path) for name in self._tensors)

    def check_all_used(self, ignorable: Iterable[str]) -> None:
        """Raises ``CheckpointError`` when a tensor was neither taken nor matches a pattern of ``ignorable``.

        A weight that nothing reads means that the model computes something that the graph does not.
        """
        known = re.compile("|".join((_BUFFERS, *ignorable)))
        extra = sorted(name for name in self._tensors if name not in self._used and not known.fullmatch(name))
        if extra:
            shown = ", ".join(f"{name!r} {list(self._tensors.shape(name))}" for name in extra[:5])
            raise CheckpointError(
                f"{self.where}: {len(extra)} tensors have no place in the architecture that the config describes: "
                f"{shown}{', ...' if len(extra) > 5 else ''}; check num_hidden_layers and model_type in the config, "
                "or save the checkpoint without them"
            )

    def _stored_name(self, name: str) -> str:
        for new, old in _OLD_NAMES:
            if name.endswith(new) and name not in self._tensors:
                renamed = name[: -len(new)] + old
                if renamed in self._tensors:
                    return renamed
        return name

    def _hint(self, name: str) -> str:
        tail = "." + name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1] if name.count(".") > 1 else name
        near = [other for other in self._tensors if other not in self._used and other.endswith(tail)][:1]
        return f" (the file has {near[0]!r})" if near else ""
