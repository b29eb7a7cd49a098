"""``encast launch``: instances of a command, each on cores and a memory node of its own."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from encast.errors import InputError
from encast.launch import (
    ALLOCATORS,
    PRESETS,
    Instance,
    MemoryBinding,
    Placement,
    environment,
    memory_binding,
    place,
    supervise,
)
from encast.launch.guard import guarded
from encast.launch.output import JsonOutput, PrefixOutput
from encast.machine import Machine, format_cpu_list, parse_cpu_list, this_machine

__all__ = ["launch_command"]


def launch_command(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments; write -- before them.", metavar="COMMAND")
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(PRESETS)}: an instance a last-level cache, or an instance a core; default: latency."
        ),
    ] = None,
    instances: Annotated[
        int | None, typer.Option(min=1, help="How many; default: as the preset says, or as many as fit.")
    ] = None,
    cores_per_instance: Annotated[
        int | None, typer.Option(min=1, help="Physical cores of each; default: as the preset says, or an equal share.")
    ] = None,
    core_list: Annotated[
        str | None, typer.Option(help="Only these CPUs: 0-3,8. Default: those of the affinity mask and the cpuset.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="Only these memory nodes: 0-1.")] = None,
    smt: Annotated[bool, typer.Option("--smt", help="Use all hardware threads of a core, not one.")] = False,
    cross_node: Annotated[
        bool, typer.Option("--cross-node", help="Let an instance span memory nodes, where it fits no single one.")
    ] = False,
    allocator: Annotated[
        str, typer.Option(help=f"The malloc to preload: system (none), {' or '.join(ALLOCATORS)}.")
    ] = "system",
    openmp: Annotated[
        bool,
        typer.Option(
            "--openmp/--no-openmp", help="Set OMP_NUM_THREADS and KMP variables for libraries that read them."
        ),
    ] = True,
    config: Annotated[
        Path | None,
        typer.Option(help="What `encast tune` wrote: each instance gets the cores that an engine with it needs."),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option("--prefix/--no-prefix", help="[INSTANCE] before every line; default: with several instances."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Seconds from SIGTERM to SIGKILL when instances are to end.")
    ] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started where, and start nothing.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: with --dry-run one document, else an event a line.")
    ] = False,
) -> None:
    """Start instances of a command, each on its own physical cores and memory node, and end all when one fails.

    Every instance finds its number from 0 on in ENCAST_INSTANCE and their count in ENCAST_INSTANCES. Its lines come
    with the number before them. Ctrl-C and other signals go to all instances; none outlives the launcher. The exit code
    is that of the first instance that failed, or 128 + the number of the signal that ended it or the launcher.
    """
    machine = this_machine()
    if shutil.which(command[0]) is None:
        raise InputError(
            f"there is no program {command[0]!r} that can be run; name one on PATH or give its path, and start a "
            "Python script with: python SCRIPT"
        )
    notes: list[str] = []
    if config is not None:
        instances, cores_per_instance, cross_node = _sizes_of(
            config, machine, instances, cores_per_instance, preset, cross_node, notes
        )
    placements = place(
        machine,
        instances=instances,
        cores_per_instance=cores_per_instance,
        preset=preset,
        core_list=None if core_list is None else _numbers(core_list, "--core-list"),
        nodes=None if nodes is None else _numbers(nodes, "--nodes"),
        smt=smt,
        cross_node=cross_node,
    )
    memory = memory_binding(machine)
    started = [
        Instance(
            command,
            placement,
            {
                **environment(placement, allocator=allocator, openmp=openmp),
                "ENCAST_INSTANCE": str(index),
                "ENCAST_INSTANCES": str(len(placements)),
            },
        )
        for index, placement in enumerate(placements)
    ]
    notes += _notes(machine, placements, memory)
    if dry_run:
        typer.echo(
            json_module.dumps(_document(started, memory, notes), indent=2) if json else _table(started, memory, notes)
        )
        return
    output = JsonOutput() if json else PrefixOutput(len(started), prefix=len(started) > 1 if prefix is None else prefix)

    def run() -> int:
        for note in [_summary(placements), *notes]:
            output.note(note)
        return supervise(started, output, memory=memory, grace_s=grace)

    raise typer.Exit(guarded(run))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        raise InputError(f"{option} is {text!r}; give numbers and ranges such as 0-3,8") from None


def _sizes_of(
    path: Path,
    machine: Machine,
    instances: int | None,
    cores_per_instance: int | None,
    preset: str | None,
    cross_node: bool,
    notes: list[str],
) -> tuple[int, int, bool]:
    """What a tuned configuration asks of ``place``: the cores of its engine, for one instance unless more are asked."""
    from encast.tune.configuration import Configuration

    if cores_per_instance is not None or preset is not None:
        raise InputError("--config says the cores of an instance; leave out --cores-per-instance and --preset")
    tuned = Configuration.of(path, batch_tokens=1)
    tuned.need_kind(on_cards=False)
    if (elsewhere := tuned.elsewhere()) is not None:
        notes.append(f"{path} was {elsewhere}")
    needed = tuned.chosen.cores
    in_node: dict[int, int] = {}
    for core in machine.allowed_cores:
        in_node[core.node] = in_node.get(core.node, 0) + 1
    if needed > max(in_node.values()) and not cross_node:
        notes.append(f"{path} needs {needed} cores, more than a memory node has: the instance spans nodes")
        cross_node = True
    return instances or 1, needed, cross_node


def _summary(placements: Sequence[Placement]) -> str:
    counts = {placement.threads for placement in placements}
    threads = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(min(counts))
    cpus = format_cpu_list(cpu for placement in placements for cpu in placement.cpus)
    return (
        f"{len(placements)} instance{'s' if len(placements) > 1 else ''} of {threads} "
        f"thread{'' if counts == {1} else 's'}, on {'' if placements[0].bound else 'any of '}CPUs {cpus}"
    )


def _notes(machine: Machine, placements: Sequence[Placement], memory: MemoryBinding) -> list[str]:
    """What a user might not expect."""
    notes = []
    taken = {cpu for placement in placements for cpu in placement.cpus}
    idle = [core.cpus[0] for core in machine.allowed_cores if not taken & set(core.cpus)]
    if idle:
        notes.append(f"{len(idle)} of {len(machine.allowed_cores)} cores stay idle: CPUs {format_cpu_list(idle)}")
    quota = machine.cgroup.cpus
    if quota is not None and quota < len(machine.allowed_cores):
        beyond = sum(placement.threads for placement in placements) > quota
        costs = ": all threads are stopped for a part of every period, which lengthens some calls" if beyond else ""
        notes.append(f"the cgroup's CPU quota of {quota:g} bounds the threads{costs}")
    if not placements[0].bound:
        notes.append(
            "instances are not bound to cores, since those of other containers with a quota would take the same ones; "
            "--core-list with as many cores as the quota pays for binds them"
        )
    if memory.how == "none" and sum(node.memory_bytes != 0 for node in machine.nodes) > 1:
        notes.append(str(memory))
    spanning = [index for index, placement in enumerate(placements) if placement.node is None]
    if spanning:
        which = format_cpu_list(spanning)
        notes.append(f"instances {which} span memory nodes or may have no memory of theirs: their memory is not bound")
    asked = os.environ.get("ENCAST_THREADS", "").strip()
    if asked and asked not in {str(placement.threads) for placement in placements}:
        notes.append(f"ENCAST_THREADS={asked} in the environment goes before the threads of an instance; unset it")
    return notes


def _document(started: Sequence[Instance], memory: MemoryBinding, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "instances": [
            {
                **dataclasses.asdict(instance.placement),
                "environment": dict(instance.environment),
                "command": [*memory.prefix(instance.placement.node), *instance.command],
            }
            for instance in started
        ],
        "memory": str(memory),
        "notes": list(notes),
    }


def _table(started: Sequence[Instance], memory: MemoryBinding, notes: Sequence[str]) -> str:
    rows = [("instance", "threads", "node", "CPUs")]
    for index, instance in enumerate(started):
        placement = instance.placement
        node = "-" if placement.node is None else str(placement.node)
        rows.append((str(index), str(placement.threads), node, format_cpu_list(placement.cpus)))
    lines = [f"{index:>8}  {threads:>7}  {node:>4}  {cpus}" for index, threads, node, cpus in rows]
    for index, instance in enumerate(started):
        variables = [f"{name}={value}" for name, value in instance.environment.items() if name != "ENCAST_INSTANCE"]
        said = f"variables  {' '.join(variables)}"
        if index == 0 or said != lines[-1]:
            lines.append(said)
    lines.append(f"memory     {str(memory).removeprefix('memory is ')}")
    lines.append(f"command    {' '.join([*memory.prefix(started[0].placement.node), *started[0].command])}")
    return "\n".join(lines + [f"! {note}" for note in notes])
