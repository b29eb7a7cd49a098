"""The reference backend: every op of the table in NumPy float64, written for reading, not for speed."""

from encast.backends.reference.evaluate import Reference
from encast.backends.reference.ops import EVALUATORS, Context, Quantized

__all__ = ["EVALUATORS", "Context", "Quantized", "Reference"]
