"""Finds the fastest artifact of a checkpoint whose metric stays within a budget (``encast compile --max-drop``).

``plans`` says what a candidate is, ``workshop`` compiles, scores and times them, ``journal`` keeps what was found,
``search`` decides which to try next, and ``find`` is the whole. ``docs/guide/budget.md`` explains the method.
"""

from encast.budget.find import find
from encast.budget.result import Candidate, Found, Layer, Missed

__all__ = ["Candidate", "Found", "Layer", "Missed", "find"]
