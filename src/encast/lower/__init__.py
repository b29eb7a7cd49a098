"""Lowering: a stored graph and this machine to a plan; the only Python that knows ISA levels and memory."""

from encast.lower.plan import StoredTensor, lower
from encast.lower.target import Target
from encast.lower.unfuse import ABLATIONS

__all__ = ["ABLATIONS", "StoredTensor", "Target", "lower"]
