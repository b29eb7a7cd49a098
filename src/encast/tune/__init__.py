"""Finds the set-up of an engine that a machine and a workload are best served with (``encast tune``).

``space`` lists the set-ups that fit the machine, ``cost_model`` estimates them from a few measured points, ``search``
decides which to measure next, ``journal`` keeps what was measured, ``evaluate`` measures one, and ``configuration``
keeps what was found in the file that ``encast.load`` reads. ``docs/howto/tune.md`` explains the method.
"""

from __future__ import annotations

__all__: list[str] = []
