"""What the fixture ``runtime`` is, for annotations: ``conftest`` is the name of several modules."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["How"]

How = Callable[..., None]
"""Takes what the runtimes of ``fake_runtime`` shall do (``fake_answers.py``) as keywords."""
