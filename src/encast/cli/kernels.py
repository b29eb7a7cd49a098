"""``encast kernels``: every kernel, whether this machine may run it, where it would be chosen, and how fast it is."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from encast.ceilings import Fingerprint
from encast.cli.kernel_gate import Product, TimedProduct, parse_product, time_product
from encast.errors import InputError
from encast.profile.table import align

__all__ = ["kernel_rows", "kernels"]

# One row (a query's tail), a short text, a full batch.
_ROW_COUNTS = (1, 16, 1024)
# Copies of weights take at least so much, and several times what the caches hold, so that they come from memory.
_MIN_WEIGHT_BYTES, _MAX_WEIGHT_BYTES, _TIMES_CACHE = 64 << 20, 1 << 30, 4
_PEAK_ROUNDS, _PEAK_ROUND_SECONDS = 10, 0.002
# A product that fails the gate is timed again after all others: whoever else had the machine may have gone by then.
_TIMINGS = 4
_OPERANDS = {"f32": "f32", "bf16": "bf16", "int8": "q8"}


def kernel_rows() -> list[dict[str, Any]]:
    """The native catalog's rows, each with ``chosen_for``: the row counts for which its class picks it.

    Raises ``ResourceError`` when ``ENCAST_ISA`` names no level that this machine has.
    """
    from encast import _core

    rows: list[dict[str, Any]] = _core.kernels()
    for row in rows:
        row["chosen_for"] = [
            count for count in _ROW_COUNTS if _core.select_kernel(row["op"], row["arithmetic"], count) == row["name"]
        ]
    return rows


def kernels(
    time: Annotated[
        list[str] | None,
        typer.Option(
            "--time",
            metavar="M,N,K[,dtype]",
            help="Time the kernels that fit a product of M rows, N columns and depth K; dtype is f32, bf16 or int8, "
            "all three when absent. May be given several times.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Threads that share a timed product, one a core.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", help="How long each kernel is timed.")] = 0.3,
    fail: Annotated[
        bool,
        typer.Option(
            "--assert", help="Exit with 1 when a chosen kernel is over 10 % slower than the best one of its class."
        ),
    ] = False,
    min_peak: Annotated[
        float | None,
        typer.Option(
            "--min-peak", help="With --assert: also when it reaches less than this fraction of its instruction's peak."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List all kernels: which can run here, and which would be chosen; or time them.

    Kernels of one op and one arithmetic class give the same bits. Timed kernels take turns, every call with other
    weights, which come from memory as a model's do; answers are checked first, and a wrong one ends with exit code 1.
    The fraction of peak compares with what the kernel's own instruction reaches on this machine in the same run.
    Under --assert, a product that fails is timed up to three times more, after all others; its quickest runs count.
    """
    if not time:
        if fail or min_peak is not None:
            raise InputError("--assert and --min-peak judge timed products; give --time M,N,K as well")
        _list(json)
        return
    if min_peak is not None and not fail:
        raise InputError("--min-peak has no effect without --assert; give both")
    if min_peak is not None and not 0 < min_peak <= 1:
        raise InputError(f"--min-peak is {min_peak:g}; more than 0 and at most 1 is accepted")
    if not 0 < seconds <= 60:
        raise InputError(f"--seconds is {seconds:g}; more than 0 and at most 60 are accepted")
    products = [product for text in time for product in parse_product(text)]
    cpus = _cpus(threads)
    timings: dict[int, TimedProduct] = {}
    judged: Iterable[int] = range(len(products))
    for timing in range(_TIMINGS if fail else 1):
        if timing and judged and not json:
            typer.echo(f"timing {timing + 1} of at most {_TIMINGS}, of what fails; the runs before count too\n")
        for index in judged:
            timed = _time(products[index], cpus, seconds)
            timings[index] = timings[index].joined(timed) if timing else timed
            if not json:
                for line in _lines(timings[index]):
                    typer.echo(line)
                typer.echo("")
        judged = [index for index, timed in timings.items() if timed.failures(min_peak)]
    wrong = [sentence for timed in timings.values() for sentence in timed.wrong()]
    failures = [sentence for timed in timings.values() for sentence in timed.failures(min_peak)] if fail else []
    if json:
        documents = [_document(timed) for timed in timings.values()]
        typer.echo(json_module.dumps({"products": documents, "wrong": wrong, "failures": failures}, indent=2))
    for sentence in [*wrong, *failures]:
        typer.echo(f"encast: {sentence}", err=True)
    if wrong or failures:
        raise typer.Exit(1)
    if fail and not json:
        typer.echo(f"selection is right for {len(products)} products")


def _cpus(threads: int) -> list[int]:
    from encast.machine import this_machine, usable_cores

    cpus = usable_cores(this_machine())
    if not 1 <= threads <= len(cpus):
        raise InputError(f"--threads is {threads}; 1 to {len(cpus)} are accepted, one for each core that may be used")
    return cpus[:threads]


def _time(product: Product, cpus: Sequence[int], seconds: float) -> TimedProduct:
    from encast import _core
    from encast.lower.target import GEMM_CLASSES, Target

    op, _ = GEMM_CLASSES[_OPERANDS[product.dtype]]
    chosen = _core.select_kernel(op, Target.here().gemm[_OPERANDS[product.dtype]], product.m)
    rows = [(row["name"], row["arithmetic"], row["isa"]) for row in _core.kernels() if row["op"] == op]
    probes = set(_core.peak_probes())

    def peak(dtype: str, isa: str) -> float | None:
        if (dtype, isa) not in probes:
            return None
        return max(rate for rate, _ in _core.measure_ops(dtype, isa, cpus, _PEAK_ROUNDS, _PEAK_ROUND_SECONDS))

    cached = max((cache.capacity(len(cpus)) for cache in Fingerprint.here().caches), default=0)
    copies = min(max(_MIN_WEIGHT_BYTES, _TIMES_CACHE * cached), _MAX_WEIGHT_BYTES)
    timer = _core.GemmTimer(product.dtype, product.m, product.n, product.k, copies, cpus)
    return time_product(product, timer, rows, str(chosen), len(cpus), seconds, peak)


def _lines(timed: TimedProduct) -> Iterator[str]:
    threads = f"{timed.threads} thread{'s' if timed.threads > 1 else ''}"
    yield f"{timed.product}, {threads}, {timed.weight_bytes / 1e6:.1f} MB of weights"
    header = ("kernel", "class", "us", "median", "GFLOP/s", "of peak", "weights GB/s", "")
    table = [header]
    for kernel in timed.kernels:
        mark = "chosen" if kernel.chosen else ""
        if not kernel.right:
            table.append((kernel.name, kernel.arithmetic, "", "", "", "", "", f"{mark} WRONG".strip()))
            continue
        fraction = timed.fraction(kernel)
        table.append(
            (
                kernel.name,
                kernel.arithmetic,
                f"{kernel.best * 1e6:.1f}",
                f"{kernel.median * 1e6:.1f}",
                f"{timed.product.operations / kernel.best / 1e9:.1f}",
                "" if fraction is None else f"{fraction:.2f}",
                f"{timed.weight_bytes / kernel.best / 1e9:.1f}",
                mark,
            )
        )
    yield from (f"  {line}" for line in align(table, left={0, 1, 7}))


def _document(timed: TimedProduct) -> dict[str, Any]:
    product = timed.product
    return {
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "dtype": product.dtype,
        "threads": timed.threads,
        "weight_bytes": timed.weight_bytes,
        "kernels": [
            {
                "name": kernel.name,
                "arithmetic": kernel.arithmetic,
                "isa": kernel.isa,
                "chosen": kernel.chosen,
                "right": kernel.right,
                "seconds_min": kernel.best if kernel.right else None,
                "seconds_median": kernel.median if kernel.right else None,
                "runs": len(kernel.seconds),
                "operations_per_second": product.operations / kernel.best if kernel.right else None,
                "peak_operations_per_second": kernel.peak,
                "fraction_of_peak": timed.fraction(kernel) if kernel.right else None,
                "weight_bytes_per_second": timed.weight_bytes / kernel.best if kernel.right else None,
            }
            for kernel in timed.kernels
        ],
    }


def _list(json: bool) -> None:
    rows = kernel_rows()
    if json:
        typer.echo(json_module.dumps(rows, indent=2))
        return
    header = ("op", "class", "kernel", "level", "runs here", *(f"{count} rows" for count in _ROW_COUNTS))
    table = [
        (
            row["op"],
            row["arithmetic"],
            row["name"],
            row["isa"],
            "yes" if row["allowed"] else "no",
            *("chosen" if count in row["chosen_for"] else "" for count in _ROW_COUNTS),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (header, *table)) for column in range(len(header))]
    for line in (header, *table):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
