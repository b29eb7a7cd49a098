"""The portable graph: one table of ops, a graph with a text form, and a verifier."""

from encast.ir.graph import Constant, Graph, Node, ValueType
from encast.ir.integers import Integers
from encast.ir.meta import FusionPromise, GraphMeta
from encast.ir.ops import OPS, Op
from encast.ir.verify import verify

__all__ = ["OPS", "Constant", "FusionPromise", "Graph", "GraphMeta", "Integers", "Node", "Op", "ValueType", "verify"]
