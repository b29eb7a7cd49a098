"""From a checkpoint, a data set and a budget to an artifact."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import encast.artifact as artifacts
from encast.archs import build_graph
from encast.artifact.write import version
from encast.budget.journal import Journal
from encast.budget.plans import INT8
from encast.budget.result import Found
from encast.budget.search import Say, Search
from encast.budget.workshop import Workshop
from encast.ceilings import Fingerprint
from encast.compile import check_sparse
from encast.data.datasets import Dataset
from encast.errors import EncastError, InputError, ResourceError
from encast.importers import open_checkpoint
from encast.scoring import PRIMARY

__all__ = ["find"]

_METHOD = 1
"""Of searching and measuring: a journal of another one is of no use."""


def find(
    source: str | os.PathLike[str],
    data: Dataset,
    *,
    out: Path,
    task: str | None = None,
    metric: str | None = None,
    max_drop: float,
    journal: Path,
    resume: bool = False,
    sparse: str = "never",
    exact: bool = False,
    adapter: str | None = None,
    threads: int | None = None,
    progress: Say = lambda step, done, total: None,
) -> Found:
    """Compiles ``source`` to ``out`` with the fastest precision whose ``metric`` on ``data`` is within the budget.

    ``max_drop``: the share of the f32 metric that may be lost, 0.01 for 1 %. ``metric``: as ``scoring.score`` names it;
    by default the first one of the kind of data. ``sparse`` says whether int8 candidates leave out their blocks of
    zeros: "always", "never", or "auto", which tries both. ``task``, ``exact`` and ``adapter`` are those of ``compile``.
    ``threads``: those that answer and are timed; by default the usable cores. ``progress(step, done, total)`` hears
    what is done next.

    ``out`` holds the best artifact so far from the first one that keeps the budget and is faster than f32. ``journal``
    has what was measured; after an interrupt or a crash ``resume`` goes on with it. It is removed at the end. The
    artifact's card says the metrics on ``data`` and the budget, and what the search found: of one that is done
    ``resume`` returns that, and where neither is there it begins anew. f32 keeps every budget, so there is always a
    result; ``Found.missed`` says where nothing else does.

    Raises ``InputError`` for bad options, for data that the model cannot be measured on, for a journal of another
    search, and for ``resume`` without a journal where an artifact of something else is; ``CheckpointError`` and
    ``UnsupportedModelError`` for the checkpoint; ``ResourceError`` when the machine cannot go on, after which
    ``resume`` can.
    """
    if isinstance(max_drop, bool) or not isinstance(max_drop, (int, float)) or not 0 <= max_drop < 1:
        raise InputError(
            f"max_drop is {max_drop!r}; the share of the metric that may be lost is needed, as 0.01 for 1 %"
        )
    check_sparse(sparse, INT8.spec)
    metric = PRIMARY[data.kind] if metric is None else metric
    target = artifacts.check_target(out)
    checkpoint = open_checkpoint(source, adapter=adapter)
    _ = checkpoint.tokenizer  # its files count once it was asked for
    task = build_graph(checkpoint, task).meta.task
    files: dict[str, str] = checkpoint.provenance["files"]
    key = {
        "method of measuring": _METHOD,
        "encast": version(),
        "checkpoint": files,
        "data": data.digest,
        "task": task,
        "metric": metric,
        "max_drop": max_drop,
        "sparse": sparse,
        "exact": exact,
        "adapter": adapter,
        "threads": threads,
        "machine": Fingerprint.here().digest,
    }
    search_sha = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    taken = target.exists() and any(target.iterdir())
    anew = resume and not journal.exists()
    if anew:
        if (found := _finished(target, search_sha)) is not None:
            progress(f"the search is done: {target.name} has what it found", 0, None)
            return found
        if taken:
            raise InputError(
                f"{journal} does not exist, so there is nothing to resume, and {target} is not known to be of this "
                "search; leave --resume out to search and replace it, or name another --out"
            )
        progress(f"{journal.name} does not exist: the search begins anew", 0, None)
    with ExitStack() as held:
        kept = Journal(journal, key=key, resume=resume and not anew, held=held)
        goes_on = False
        try:
            with _scratch(target) as scratch:
                options: dict[str, Any] = {"task": task, "exact": exact, "adapter": adapter}
                shop = Workshop(source, data, target, scratch, files=files, threads=threads, **options)
                search = Search(
                    shop, kept, metric=metric, max_drop=max_drop, sparse=sparse, keep=shop.keep, say=progress
                )
                search.run()
                chosen = search.chosen
                found = Found(
                    artifact=shop.keep(chosen.plan, chosen.sparse),
                    data=data.short_name,
                    rows=len(data.rows),
                    task=task,
                    metric=metric,
                    max_drop=max_drop,
                    reference=search.reference,
                    chosen=chosen,
                    candidates=tuple(search.candidates),
                    layers=tuple(search.layers),
                    missed=search.missed,
                )
                _note(found, search_sha)
        except (KeyboardInterrupt, ResourceError) as error:
            # Without a journal, --resume does not replace what was at ``out`` before.
            goes_on = bool(kept) or taken
            if goes_on and isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{journal} has what was measured; --resume goes on") from None
            raise
        finally:
            if not (kept or goes_on):
                kept.remove()  # to go on from it would be to begin anew, or to fail at once
        kept.remove()  # the last of all: whoever is killed before it goes on with it
        return found


def _finished(target: Path, search_sha: str) -> Found | None:
    """What this search found, where its artifact is in its place and whole; None for others."""
    try:
        opened = artifacts.open(target)
        record = opened.card.get("search") or {}
        if record.get("key") != search_sha:
            return None
        opened.verify()
        return Found.from_json(record["found"], target)
    except (EncastError, LookupError, TypeError, ValueError, AttributeError):  # a record that no search wrote
        return None


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target``, which is removed."""
    folder = target.with_name(f".{target.name}.search")
    # Of a search that was killed: the journal's lock says that none is running.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
    except OSError as error:
        raise ResourceError(
            f"{folder} cannot be made ({error.strerror or error}); candidates are compiled there: choose another "
            "place for the artifact"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _note(found: Found, search_sha: str) -> None:
    """The card's ``accuracy``, as ``encast eval`` writes it, with the budget beside it; and ``search``, for
    ``_finished``."""
    assert found.chosen.metrics is not None
    entry = {
        "task": found.task,
        "rows": found.rows,
        "metrics": {name: round(value, 4) for name, value in found.chosen.metrics.items()},
        "budget": {
            "metric": found.metric,
            "max_drop": found.max_drop,
            "f32": round(found.reference, 4),
            "drop": found.chosen.drop,
        },
    }
    measured = dict(artifacts.open(found.artifact).card.get("accuracy") or {})
    record = {name: value for name, value in found.to_json().items() if name != "artifact"}
    artifacts.update_card(
        found.artifact,
        accuracy={**measured, found.data: entry},
        search={"key": search_sha, "found": record},
    )
