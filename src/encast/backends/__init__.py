"""What runs a graph: every backend offers ``Runnable``."""

from encast.backends.base import Runnable

__all__ = ["Runnable"]
