"""Where processes run: topology to placements, the environment they need, and a supervisor for several at once."""

from __future__ import annotations

from encast.launch.environment import ALLOCATORS, environment
from encast.launch.memory import MemoryBinding, memory_binding
from encast.launch.placement import PRESETS, Placement, place
from encast.launch.process import bind, preexec, signal_name
from encast.launch.supervise import Instance, supervise

__all__ = [
    "ALLOCATORS",
    "PRESETS",
    "Instance",
    "MemoryBinding",
    "Placement",
    "bind",
    "environment",
    "memory_binding",
    "place",
    "preexec",
    "signal_name",
    "supervise",
]
