"""How a system's instances are placed: the ``launcher`` group of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from encast.errors import InputError
from encast.launch import Placement, environment, place
from encast.machine import parse_cpu_list

if TYPE_CHECKING:
    from encast.machine import Machine

__all__ = ["Launcher"]


@dataclass(frozen=True)
class Launcher:
    """The options of ``encast.launch.place`` and ``encast.launch.environment``, which explain them.

    ``core_list`` and ``nodes`` are lists as the kernel writes them (``0-3,8``).
    """

    name: str
    instances: int | None = None
    cores_per_instance: int | None = None
    preset: str | None = None
    core_list: str | None = None
    nodes: str | None = None
    smt: bool = False
    cross_node: bool = False
    allocator: str = "system"
    openmp: bool = True

    def place(
        self, machine: Machine, *, instances: int | None = None, threads: int | None = None
    ) -> tuple[Placement, ...]:
        """Places for the launcher's own instances, or for ``instances`` of ``threads`` threads each.

        A thread is a core, or with ``smt`` a hardware thread of cores that an instance has as a whole. What fits
        without numbers fits with those that came of it, under a quota too: ``preset`` holds for both. Raises
        ``InputError`` for what does not fit the machine, saying what would.
        """
        sized = instances is not None or threads is not None
        usable = set(_numbers("core_list", self.core_list) or machine.affinity)
        wide = max((len(usable & set(core.cpus)) for core in machine.allowed_cores), default=1) if self.smt else 1
        cores = None if threads is None else -(-threads // max(1, wide))
        places = place(
            machine,
            instances=instances if sized else self.instances,
            cores_per_instance=cores if sized else self.cores_per_instance,
            preset=self.preset,  # of given sizes it says how a quota is rounded
            core_list=_numbers("core_list", self.core_list),
            nodes=_numbers("nodes", self.nodes),
            smt=self.smt,
            cross_node=self.cross_node,
        )
        found = sorted({one.threads for one in places})
        if threads is not None and found != [threads]:
            raise InputError(
                f"an instance of {threads} thread{'s' if threads > 1 else ''} cannot be placed: with launcher.smt=true "
                f"it has all hardware threads of its cores, here {' or '.join(map(str, found))}; give that number, or "
                "launcher.smt=false"
            )
        return places

    def environment(self, placement: Placement) -> dict[str, str]:
        """The variables that an instance there is started with."""
        return environment(placement, allocator=self.allocator, openmp=self.openmp)


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else parse_cpu_list(str(text))
    except ValueError:
        raise InputError(f"launcher.{name} is {text!r}; numbers and ranges such as 0-3,8 are needed") from None
