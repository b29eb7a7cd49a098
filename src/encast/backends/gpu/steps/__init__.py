"""One function an op, over PyTorch: what ``ir/ops.py`` says, on the device, without waiting for it.

A step gets the context (``context.py``), the operands in the table's order (None for an absent one) and the attributes
by name, and returns the value, or a tuple of values. Floating values are of the dtype ``Context.stored``; norms,
softmax, pooling and narrowing compute in f32.
"""

from encast.backends.gpu.steps import attention, gather, narrow, products, rows
from encast.backends.gpu.steps.context import STEPS, Context

__all__ = ["STEPS", "Context", "attention", "gather", "narrow", "products", "rows"]
