"""Kernels in Triton, and the table of steps that run on them: those of ``steps`` where it has none.

Every program makes its rows in an order that depends on their own sequence alone, so what a kernel makes of a row has
the same bits whatever else is in the batch. With ``TRITON_INTERPRET=1`` in the environment before this package is
imported, the kernels run on the CPU, under Triton's interpreter: that is how they are tested without a card.
"""

from encast.backends.gpu.kernels.dtypes import INTERPRETED, VERSION
from encast.backends.gpu.kernels.table import STEPS, steps_for

__all__ = ["INTERPRETED", "STEPS", "VERSION", "steps_for"]
