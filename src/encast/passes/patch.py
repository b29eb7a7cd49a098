"""What every pass needs: an index of producers and users, patches, and a way to say why nothing matched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from encast.errors import GraphError
from encast.ir import Graph, Node

__all__ = ["Index", "MismatchError", "Patch", "apply", "fresh_name"]


class MismatchError(Exception):
    """A pattern does not hold at a node; the text names the condition that failed."""


class Index:
    """Who makes and who reads every value; a snapshot, to be built anew after the graph changed."""

    def __init__(self, graph: Graph) -> None:
        self._outputs = frozenset(graph.outputs.values())
        self._producers: dict[str, Node] = {}
        self._users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for output in node.outputs:
                self._producers[output] = node
            for operand in dict.fromkeys(node.inputs):
                self._users.setdefault(operand, []).append(node)

    def producer(self, value: str) -> Node | None:
        """The node that makes a value; None for inputs and constants."""
        return self._producers.get(value)

    def users(self, value: str) -> Sequence[Node]:
        """The nodes that read a value or constant, in order, each once."""
        return self._users.get(value, ())

    def is_output(self, value: str) -> bool:
        return value in self._outputs

    def made_by(self, value: str, *ops: str) -> Node:
        """The node that makes ``value``, which must be of one of ``ops``; raises ``MismatchError``."""
        node = self._producers.get(value)
        if node is None or node.op not in ops:
            found = "no node" if node is None else f"{node.op} {node.name!r}"
            raise MismatchError(f"{value!r} is made by {found}, not by {' or '.join(ops)}")
        return node

    def need_private(self, value: str, *readers: Node) -> None:
        """Raises ``MismatchError`` unless ``readers`` alone read ``value``, so that it may disappear."""
        if self.is_output(value):
            raise MismatchError(f"{value!r} is an output of the graph")
        allowed = {id(reader) for reader in readers}
        for user in self.users(value):
            if id(user) not in allowed:
                raise MismatchError(f"{value!r} is also read by {user.op} {user.name!r}")


@dataclass(frozen=True)
class Patch:
    """Puts ``added`` where ``anchor`` (the last of ``removed`` unless given) stood, and takes ``removed`` away.

    Outputs of ``added`` may take over the names of removed outputs.
    """

    removed: tuple[Node, ...]
    added: tuple[Node, ...]
    anchor: Node | None = None


def apply(graph: Graph, patches: Iterable[Patch]) -> int:
    """Applies patches that do not overlap, in one walk over the nodes; returns how many.

    Raises ``GraphError`` if two patches remove one node or if a patch names a node that the graph lacks.
    """
    place = {id(node): index for index, node in enumerate(graph.nodes)}
    gone: set[int] = set()
    added: dict[int, list[Node]] = {}
    count = 0
    for patch in patches:
        for node in patch.removed:
            if id(node) in gone or id(node) not in place:
                raise GraphError(f"two rewrites claim node {node.name!r} ({node.op}), or it is not in the graph")
            gone.add(id(node))
            for output in node.outputs:
                del graph.values[output]
        anchor = patch.anchor or max(patch.removed, key=lambda node: place[id(node)])
        added.setdefault(id(anchor), []).extend(patch.added)
        count += 1
    if not count:
        return 0
    old, graph.nodes = graph.nodes, []
    for node in old:
        for new in added.get(id(node), ()):
            graph.append(new)
        if id(node) not in gone:
            graph.nodes.append(node)
    return count


def fresh_name(graph: Graph, name: str) -> str:
    """``name``, or with the first free number behind it if the graph has it already."""
    candidate, number = name, 1
    while candidate in graph.values or candidate in graph.constants or candidate in graph.inputs:
        number += 1
        candidate = f"{name}.{number}"
    return candidate
