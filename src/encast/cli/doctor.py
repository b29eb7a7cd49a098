"""``encast doctor``: what this machine is, and what stands in the way of speed."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from encast import ceilings, knobs
from encast.ceilings import Kept
from encast.errors import EncastError, InputError
from encast.machine import (
    Machine,
    default_threads,
    format_cpu_list,
    quota_alone_limits,
    this_machine,
    usable_cores,
)

__all__ = ["Finding", "Level", "diagnose", "doctor", "size_text"]

_HOW_TO_MEASURE = "measure, best when nothing else runs: encast doctor --measure"


@dataclass(frozen=True)
class Level:
    """A row of the ISA table: ``missing`` features, and whether it is ``allowed`` (usable and not forbidden).

    ``slow``: why it is passed over for earlier levels, which are faster on this processor; empty for all others.
    """

    name: str
    features: str
    missing: str
    allowed: bool
    slow: str


@dataclass(frozen=True)
class Finding:
    """Something that costs speed or will not work: what it is, and what to do about it."""

    subject: str
    problem: str
    remedy: str


def diagnose(
    machine: Machine, levels: Sequence[Level], knob_errors: Sequence[str] = (), kept: Kept | None = None
) -> list[Finding]:
    """What is wrong with the machine, in the order of the report. Pure: it judges the facts it is given."""
    return [
        *(Finding("knobs", error, "correct the variable, or unset it") for error in knob_errors),
        *_isa_findings(levels),
        *_cpu_findings(machine),
        *_memory_findings(machine),
        *_ceilings_findings(kept),
    ]


def _isa_findings(levels: Sequence[Level]) -> Iterator[Finding]:
    usable = [level for level in levels if not level.missing]
    allowed = [level for level in levels if level.allowed]
    if usable and allowed and usable[-1].name != allowed[-1].name:
        yield Finding(
            "isa",
            f"ENCAST_ISA holds kernels down to {allowed[-1].name}; this machine has {usable[-1].name}",
            "unset ENCAST_ISA",
        )
    if [level.name for level in usable] == ["scalar"]:
        missing = levels[1].missing if len(levels) > 1 else "vector instructions"
        yield Finding(
            "isa",
            f"only the scalar kernels run here, many times slower: the processor does not show {missing}",
            "in a virtual machine, choose a CPU model that passes AVX2 through (host, or x86-64-v3 and newer)",
        )


def _cpu_findings(machine: Machine) -> Iterator[Finding]:
    cores, allowed = len(machine.cores), len(machine.allowed_cores)
    quota = machine.cgroup.cpus
    if allowed < cores:
        yield Finding(
            "affinity",
            f"this process may use {allowed} of {cores} physical cores",
            "start it without taskset, numactl or a cpuset if it should have them all",
        )
    if quota is not None and quota < 1:
        yield Finding(
            "cgroup",
            f"the CPU quota is {quota:g} of one CPU: after {quota:.0%} of every period all threads are stopped",
            "raise the limit to 1 CPU or more (Kubernetes resources.limits.cpu, docker --cpus)",
        )
    elif quota is not None and quota < allowed:
        yield Finding(
            "cgroup",
            f"the CPU quota is {quota:g} CPUs, though {allowed} cores are in reach; {int(quota)} threads are used",
            "raise the limit, or pin the container to whole cores (cpuset), which also steadies the latency",
        )
    if quota is not None and quota >= 1 and quota != int(quota):
        yield Finding(
            "cgroup",
            f"the CPU quota {quota:g} is no whole number: {quota - int(quota):g} of a CPU cannot carry a thread",
            "set the limit to a whole number of CPUs",
        )
    if machine.governor is not None and machine.governor in ("powersave", "conservative"):
        yield Finding(
            "frequency",
            f"the frequency governor is {machine.governor}: short requests may run at a low clock",
            "as root: cpupower frequency-set -g performance (laptops: it costs battery)",
        )
    homes = {core.node for core in machine.allowed_cores}
    if len(homes) > 1:
        yield Finding(
            "numa",
            f"the process spans {len(homes)} memory nodes; threads of one team would read weights from afar",
            f"start an instance a node: encast launch --instances {len(homes)} -- COMMAND",
        )


def _memory_findings(machine: Machine) -> Iterator[Finding]:
    empty = [node.index for node in machine.nodes if node.cpus and node.memory_bytes == 0]
    if empty:
        yield Finding(
            "numa",
            f"memory node {', '.join(map(str, empty))} has CPUs and no memory",
            "fill its memory slots, or keep off its CPUs (numactl --cpunodebind)",
        )
    limit = machine.cgroup.memory_bytes
    if limit is not None and limit < 512 << 20:
        yield Finding(
            "cgroup",
            f"the memory limit is {size_text(limit)}; the f32 weights of BERT-base alone are 420 MiB",
            "raise the limit (Kubernetes resources.limits.memory, docker --memory)",
        )
    if machine.huge_pages.transparent == "never":
        yield Finding(
            "huge pages",
            "transparent huge pages are off: large weight matrices miss the TLB more often",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _ceilings_findings(kept: Kept | None) -> Iterator[Finding]:
    if kept is not None and kept.problem is not None:
        yield Finding("ceilings", kept.problem, _HOW_TO_MEASURE)
    if kept is not None and kept.ceilings is not None and kept.ceilings.doubts:
        yield Finding(
            "ceilings",
            "the machine was noisy when they were measured: " + "; ".join(kept.ceilings.doubts),
            "measure again when nothing else runs: encast doctor --measure",
        )


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the machine's ceilings (about ten seconds) and keep them in the user's cache directory.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Show a card too (cuda, cuda:1, ...); with --measure its ceilings are measured, in seconds."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print processor, ISA levels, cores, memory and limits, and what is wrong with them.

    The ceilings are what bounds any kernel: the rate of the product instructions, the read bandwidth of the caches and
    of memory, and the hand-over between threads. ``encast profile`` shows times as fractions of them. A card's are the
    rates of large products and of copies; ``encast bench`` shows speeds as fractions of them.
    """
    machine = this_machine()
    errors: list[str] = []
    for knob in knobs.KNOBS:
        try:
            knob.read()
        except EncastError as error:
            errors.append(str(error))
    levels: list[Level] = []
    from encast import _core

    try:
        levels = [Level(*row) for row in _core.isa_levels()]
    except EncastError as error:
        errors.append(str(error))
    kept: Kept | None
    failure: EncastError | None = None
    card = None
    if device is not None:
        from encast.cli.doctor_card import CardReport

        card = CardReport(device, measure)
        failure = card.failure
    if measure and card is None:
        if errors:
            raise InputError(errors[0])
        kept, failure = _measured(machine)
    else:
        kept = _kept(machine)
    findings = [*diagnose(machine, levels, errors, kept), *(card.findings() if card is not None else ())]
    if json:
        document = _document(machine, levels, findings, kept)
        typer.echo(json_module.dumps(document if card is None else {**document, "card": card.document()}, indent=2))
    else:
        shown = [*_lines(machine, levels), *_ceilings_lines(kept), *(card.lines() if card is not None else ())]
        for subject, text in shown:
            typer.echo(f"{subject:<12}{text}")
        typer.echo("")
        if not findings:
            typer.echo("Nothing is wrong with this machine.")
        for finding in findings:
            typer.echo(f"! {finding.subject}: {finding.problem}")
            typer.echo(f"    {finding.remedy}")
    if failure is not None:
        raise failure


def _measured(machine: Machine) -> tuple[Kept, EncastError | None]:
    """Measures and keeps. What cannot be kept is shown all the same; the error waits for the end."""
    terminal = sys.stderr.isatty()

    def show(what: str) -> None:
        if terminal:
            typer.echo(f"\r\033[Kmeasuring {what}", err=True, nl=False)

    measured = ceilings.measure(machine, show)
    if terminal:
        typer.echo("\r\033[K", err=True, nl=False)
    try:
        return Kept(ceilings.keep(measured), measured), None
    except EncastError as error:
        return Kept(None, measured), error


def _kept(machine: Machine) -> Kept | None:
    try:
        return ceilings.find(machine)
    except EncastError:  # a knob's wrong value, which is a finding already
        return None


def _document(
    machine: Machine, levels: Sequence[Level], findings: Sequence[Finding], kept: Kept | None
) -> dict[str, Any]:
    measured = None if kept is None or kept.ceilings is None else ceilings.to_json(kept.ceilings)
    return {
        **dataclasses.asdict(machine),
        "isa_levels": [dataclasses.asdict(level) for level in levels],
        "isa_best": _best(levels),
        "default_threads": default_threads(machine),
        "thread_cpus": list(machine.affinity) if quota_alone_limits(machine) else usable_cores(machine),
        "knobs": {knob.name: knob.doc for knob in knobs.KNOBS},
        "ceilings": None if measured is None else {**measured, "path": kept and kept.path and str(kept.path)},
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _best(levels: Sequence[Level]) -> str | None:
    chosen = [level.name for level in levels if level.allowed and not level.slow]
    return chosen[-1] if chosen else None


def _lines(machine: Machine, levels: Sequence[Level]) -> Iterator[tuple[str, str]]:
    yield "processor", machine.processor + (" (virtual machine)" if machine.virtual else "")
    if levels:
        yield "isa", ", ".join(level.name for level in levels if level.allowed) + f"; kernels use {_best(levels)}"
        for level in levels:
            if level.missing:
                yield "", f"{level.name}: not here, lacks {level.missing}"
            elif not level.allowed:
                yield "", f"{level.name}: forbidden by ENCAST_ISA"
            elif level.slow:
                yield "", f"{level.name}: not chosen, {level.slow}"
    yield (
        "cores",
        f"{len(machine.cores)} physical, {len(machine.online)} hardware threads "
        f"(SMT {machine.threads_per_core} a core); {len(machine.allowed_cores)} cores allowed",
    )
    slower = sum(core.efficient for core in machine.cores)
    if slower:
        yield "", f"{slower} of them are the slower kind of a hybrid processor; threads take them last"
    if machine.offline:
        yield "", f"CPUs {format_cpu_list(machine.offline)} are offline"
    where = f"on CPUs {', '.join(map(str, usable_cores(machine)))}"
    if quota_alone_limits(machine):
        where = "bound to no CPUs, since a quota limits them"
    yield "threads", f"{default_threads(machine)} by default, {where}"
    for cache in machine.caches:
        shared = "" if cache.shared_by == 1 else f", shared by {cache.shared_by} hardware threads"
        yield "cache", f"L{cache.level} {cache.kind} {size_text(cache.bytes)}{shared}"
    domains = Counter(core.domain for core in machine.cores)
    if len(domains) > 1:
        sizes = " or ".join(map(str, sorted(set(domains.values()))))
        yield "", f"{len(domains)} groups of {sizes} cores share a last-level cache each"
    for node in machine.nodes:
        memory = "memory unknown" if node.memory_bytes is None else size_text(node.memory_bytes)
        yield "numa", f"node {node.index}: {len(node.cpus)} CPUs, {memory}"
    limits = machine.cgroup
    quota = "no CPU quota" if limits.cpus is None else f"CPU quota {limits.cpus:g}"
    cpuset = "no cpuset" if limits.cpuset is None else f"cpuset of {len(limits.cpuset)} CPUs"
    memory = "no memory limit" if limits.memory_bytes is None else f"memory limit {size_text(limits.memory_bytes)}"
    yield "cgroup", f"{quota}, {cpuset}, {memory}"
    yield "governor", machine.governor or "not shown by the kernel"
    yield "allocator", machine.allocator
    pages = machine.huge_pages
    yield "huge pages", f"transparent: {pages.transparent or 'unknown'}; reserved {pages.reserved}, free {pages.free}"
    if pages.transparent in ("always", "madvise"):
        late = "" if pages.defrag in ("always", "madvise", "defer+madvise", None) else ", where one is free at once"
        yield "", f"arenas have them{late}, and so would weights with ENCAST_COPY_WEIGHTS=1; the mapped file"
        yield "", "of the weights has them if its file system keeps it in large blocks (FilePmdMapped in smaps)"
    elif pages.transparent == "never":
        yield "", "neither arenas nor weights can have them"


def _ceilings_lines(kept: Kept | None) -> Iterator[tuple[str, str]]:
    """The measured ceilings, a line each: one thread, then all."""
    if kept is None:
        return
    if kept.ceilings is None:
        yield "ceilings", f"not measured; to {_HOW_TO_MEASURE}"
        return
    measured = kept.ceilings
    counts = sorted({1, measured.threads})
    threads = " and ".join(map(str, counts)) + (" thread" if counts == [1] else " threads")
    where = "not kept" if kept.path is None else f"kept in {kept.path}"
    yield "ceilings", f"measured {measured.measured:%Y-%m-%d %H:%M} UTC with {threads}, {where}"

    def line(name: str, rates: list[float], unit: str) -> tuple[str, str]:
        return "", f"{name:<16}{''.join(f'{rate / 1e9:10.1f}' for rate in rates)}  {unit}"

    for dtype, isa in dict.fromkeys((dtype, isa) for dtype, isa, _ in measured.ops_per_second):
        yield line(f"{dtype} {isa}", [measured.ops_per_second[dtype, isa, count] for count in counts], "Gop/s")
    sizes = {cache.name: f" {size_text(cache.bytes)}" for cache in measured.fingerprint.caches}
    for level in dict.fromkeys(level for level, _ in measured.bandwidth):
        name = f"{level}{sizes.get(level, '')}"
        yield line(name, [measured.bandwidth[level, count] for count in counts], "GB/s read")
    if measured.threads > 1:
        yield "", f"{'barrier':<16}{'':10}{measured.handoff_ns:10.0f}  ns"


def size_text(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} bytes"
