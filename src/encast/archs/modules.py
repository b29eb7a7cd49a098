"""Writing graphs module by module, with the checkpoint's own paths as names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from encast.archs.weights import Float32, Weights
from encast.errors import CheckpointError, UnsupportedModelError
from encast.ir import Graph

__all__ = ["Modules", "in_other_rows", "is_zeros", "tensors_of"]

_ZEROS = "zeros."
_SWAPPED = "[swapped]"
_REPEATED = "[repeated]"
_OF_HEADS, _OF_PAIRS = "heads.", "pairs."
_OTHERS = ("[padded]", "[window]")


class Modules:
    """The modules of a checkpoint under one prefix, added to one graph.

    Constants and nodes are named by their path below the prefix, so that they are the same whether the encoder was
    saved alone (no prefix) or under a head (``bert.``). A constant that several modules share is added once.
    """

    def __init__(self, graph: Graph, weights: Weights, prefix: str = "") -> None:
        self.graph = graph
        self.weights = weights
        self.prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self.prefix + name in self.weights

    def below(self, path: str) -> bool:
        """Whether the checkpoint has a tensor whose path begins so, by which layouts of one architecture differ."""
        return self.weights.any_below(self.prefix + path)

    def constant(self, name: str, *shape: int) -> str:
        """The tensor of that path as a constant; returns its name in the graph."""
        if name not in self.graph.constants:
            self.graph.add_constant(name, self.weights.take(self.prefix + name, shape))
        return name

    def parts(self, name: str, parts: Sequence[str], size: int, *shape: int) -> list[str]:
        """The rows of one tensor, ``size`` for each part, as constants of their own: ``NAME[PART]``."""
        names = [f"{name}[{part}]" for part in parts]
        rows = self.weights.take(self.prefix + name, (len(parts) * size, *shape))
        for index, part in enumerate(names):
            self.graph.add_constant(part, rows[index * size : (index + 1) * size])
        return names

    def parts_of_heads(
        self, name: str, parts: Sequence[str], heads: int, size: int, *shape: int, pairs: Collection[str] = ()
    ) -> list[str]:
        """The rows of one tensor that has, head by head, ``size`` of each part, as constants of their own.

        Those of ``pairs`` are for op ``rotary``, of a model that turns neighbours: rows ``2i`` and ``2i + 1`` of a head
        become ``i`` and ``size/2 + i``, and the constant ``NAME[pairs.PART]``; the others are ``NAME[heads.PART]``.
        """
        rows = self.weights.take(self.prefix + name, (heads * len(parts) * size, *shape))
        rows = rows.reshape(heads, len(parts), size, *shape)
        names = []
        for index, part in enumerate(parts):
            own, form = rows[:, index], _OF_HEADS
            if part in pairs:
                own, form = own.reshape(heads, size // 2, 2, *shape).swapaxes(1, 2), _OF_PAIRS
            array = np.ascontiguousarray(own).reshape(-1, *shape)
            names.append(self.graph.add_constant(f"{name}[{form}{part}]", array))
        return names

    def stack(self, names: Sequence[str], size: int, *shape: int) -> str:
        """One constant with the rows of several tensors, ``size`` of each, in this order: ``NAME+NAME``."""
        rows = [self.weights.take(self.prefix + name, (size, *shape)) for name in names]
        return self.graph.add_constant("+".join(names), np.concatenate(rows))

    def halves_swapped(self, name: str, size: int, *shape: int) -> str:
        """The tensor of that path with the second half of its ``size`` rows first, as a constant: ``NAME[swapped]``."""
        first, second = np.split(self.weights.take(self.prefix + name, (size, *shape)), 2)
        return self.graph.add_constant(f"{name}{_SWAPPED}", np.concatenate([second, first]))

    def padded_before(self, name: str, size: int, *shape: int) -> str:
        """The tensor of that path with a row of zeros before its ``size`` rows, as a constant: ``NAME[padded]``."""
        padded = f"{name}[padded]"
        if padded not in self.graph.constants:
            rows = self.weights.take(self.prefix + name, (size, *shape))
            self.graph.add_constant(padded, np.concatenate([np.zeros((1, *shape), np.float32), rows]))
        return padded

    def zeros(self, size: int) -> str:
        """A constant of zeros, one for all that ask for this size."""
        name = f"{_ZEROS}{size}"
        if name not in self.graph.constants:
            self.graph.add_constant(name, np.zeros(size, np.float32))
        return name

    def array(self, name: str, *shape: int) -> Float32:
        """The tensor of that path without adding it to the graph."""
        return self.weights.take(self.prefix + name, shape)

    def embedding(self, ids: str, path: str, rows: int, dim: int) -> str:
        """Module ``path``, an embedding table, read at ``ids``."""
        return self.graph.add("embedding", ids, self.constant(f"{path}.weight", rows, dim), name=path)

    def linear(
        self, x: str, path: str, size: int, inner: int, *, name: str = "", layer: int = -1, bias: bool = True
    ) -> str:
        """Module ``path``, ``x @ weight.T + bias`` with ``weight: f32[size, inner]``, as node ``name`` (``path``)."""
        weight = self.constant(f"{path}.weight", size, inner)
        added = self.constant(f"{path}.bias", size) if bias else ""
        return self.graph.add("linear", x, weight, added, name=name or path, layer=layer, activation="none")

    def layer_norm(
        self, x: str, path: str, size: int, eps: float, *, name: str = "", layer: int = -1, bias: bool = True
    ) -> str:
        """Module ``path``, a layer norm, as node ``name`` (``path``); without a bias it adds zeros."""
        gamma = self.constant(f"{path}.weight", size)
        beta = self.constant(f"{path}.bias", size) if bias else self.zeros(size)
        return self.graph.add("layer_norm", x, gamma, beta, name=name or path, layer=layer, eps=eps)

    def rms_norm(self, x: str, path: str, size: int, eps: float, *, layer: int = -1) -> str:
        """Module ``path``, a norm by the root mean square."""
        return self.graph.add("rms_norm", x, self.constant(f"{path}.weight", size), name=path, layer=layer, eps=eps)

    def repeated(self, name: str, groups: int, times: int, *shape: int) -> str:
        """The tensor of that path with each of its ``groups`` of rows ``times`` over, as a constant:
        ``NAME[repeated]``; ``shape``: the rows of a group, and all other axes.
        """
        if times == 1:
            return self.constant(name, groups * shape[0], *shape[1:])
        rows = self.weights.take(self.prefix + name, (groups * shape[0], *shape[1:])).reshape(groups, *shape)
        return self.graph.add_constant(f"{name}[repeated]", np.repeat(rows, times, axis=0).reshape(-1, *shape[1:]))

    def activation(self, x: str, kind: str, *, name: str, layer: int = -1) -> str:
        """An activation, which has no path of its own in a checkpoint."""
        return self.graph.add("activation", x, name=name, layer=layer, kind=kind)

    def same(self, name: str, shape: tuple[int, ...], constant: str) -> bool:
        """Whether the tensor of that path has exactly the values of a constant of the graph."""
        return np.array_equal(self.array(name, *shape), self.graph.constants[constant].array)


def is_zeros(constant: str) -> bool:
    """Whether a constant of this name is that of ``Modules.zeros``."""
    return constant.startswith(_ZEROS)


def tensors_of(constants: Mapping[str, Float32], groups: int = 1, heads: int = 1) -> dict[str, Float32]:
    """The tensors of which ``Modules`` makes these constants, given in the order in which it adds them.

    ``groups``: how many groups of rows a ``repeated`` constant has, each for so many of the ``heads``. Raises
    ``CheckpointError`` where the heads of a group have other rows, and ``UnsupportedModelError`` for a constant in a
    form that is not taken apart: ``padded``.
    """
    tensors: dict[str, Float32] = {}
    parts: dict[str, list[Float32]] = {}
    of_heads: dict[str, list[Float32]] = {}
    for name, array in constants.items():
        path, bracket, form = name.partition("[")
        if "+" in name:
            names = name.split("+")
            tensors.update(zip(names, np.split(array, len(names)), strict=True))
        elif not bracket:
            tensors[name] = array
        elif bracket + form == _SWAPPED:
            tensors[path] = np.concatenate(np.split(array, 2)[::-1])
        elif bracket + form == _REPEATED:
            rows = array.reshape(groups, heads // groups, -1, *array.shape[1:])
            if not (rows == rows[:, :1]).all():
                raise CheckpointError(
                    f"{path!r} of the exported graph has other rows for each head, config.json {groups} "
                    f"num_key_value_heads for {heads} heads: take the files of the same model"
                )
            tensors[path] = rows[:, 0].reshape(-1, *array.shape[1:])
        elif form.startswith(_OF_PAIRS):
            pairs = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            of_heads.setdefault(path, []).append(pairs.reshape(heads, -1, *array.shape[1:]))
        elif form.startswith(_OF_HEADS):
            of_heads.setdefault(path, []).append(array.reshape(heads, -1, *array.shape[1:]))
        elif bracket + form in _OTHERS:
            raise UnsupportedModelError(f"{path!r} is {form[:-1]}, a form that is not read of exports")
        else:
            parts.setdefault(path, []).append(array)
    tensors |= {path: np.concatenate(arrays) for path, arrays in parts.items()}
    packed = {path: np.concatenate(arrays, axis=1) for path, arrays in of_heads.items()}
    return tensors | {path: array.reshape(-1, *array.shape[2:]) for path, array in packed.items()}


def in_other_rows(constant: str) -> bool:
    """Whether a constant of this name has rows that lie apart in its tensor side by side: ``parts_of_heads``."""
    return constant.partition("[")[2].startswith(_OF_PAIRS)
