"""The journal of a search: Optuna's file with every trial, from which a search that was ended goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from encast.backends.groups import Setup
from encast.errors import EncastError, InputError, ResourceError, install_hint
from encast.files import lock
from encast.tune.measurement import Trial

__all__ = ["open_study"]

_STUDY = "encast-tune"


def open_study(
    path: Path | None,
    setups: Sequence[Setup],
    *,
    seed: int,
    key: Mapping[str, Any],
    resume: bool,
    held: contextlib.ExitStack,
) -> tuple[Any, list[Trial]]:
    """Optuna's study and the trials of ``setups`` that it holds already; ``path`` keeps them (None: memory only).

    ``key``: what a search must share with the one that it resumes. No other search writes to the file until ``held`` is
    closed. Raises ``InputError`` for a journal that belongs to something else, is there without ``resume`` or is being
    written, ``ResourceError`` for one that cannot be read or written.
    """
    try:
        import optuna
        from optuna import storages
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise InputError(f"{error.name} is not installed, which the search needs: {install_hint('bench')}") from None

    class Backend(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            try:
                super().append_logs(logs)
            except OSError as error:
                raise ResourceError(
                    f"{path}: the journal of the search cannot be written ({error.strerror or error}); make room, then "
                    "--resume goes on with what was measured"
                ) from None

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=1)
    with _journal_errors(path):
        if path is None and not resume:
            return optuna.create_study(sampler=sampler, study_name=_STUDY, direction="maximize"), []
        if path is None or (resume and not path.exists()):
            raise InputError(f"{path} does not exist, so there is nothing to resume; leave --resume out")
        if not resume:
            # Whole or not there, whatever ends the search; and of two that begin at once the second finds the first's.
            with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as folder:
                head = Path(folder) / "journal"
                storage = storages.JournalStorage(JournalFileBackend(str(head)))
                study = optuna.create_study(storage=storage, study_name=_STUDY, direction="maximize")
                study.set_user_attr("key", dict(key))
                try:
                    os.link(head, path)
                except FileExistsError:
                    raise InputError(
                        f"{path} holds the trials of an earlier search; go on with it by --resume, or remove it to "
                        "begin anew"
                    ) from None
        file = held.enter_context(path.open("rb"))
        lock(
            file.fileno(), InputError(f"another `encast tune` writes to {path}; wait for its end or name another --out")
        )
        _cut_to_whole_lines(path)
        storage = storages.JournalStorage(Backend(str(path)))
        study = optuna.load_study(storage=storage, sampler=sampler, study_name=_STUDY)
        if not resume:
            return study, []
        stored = study.user_attrs.get("key")
        if not isinstance(stored, Mapping):
            raise InputError(f"{path} is no journal of `encast tune`; remove it, or name another --out")
        for name, value in key.items():
            if stored.get(name) != value:
                raise InputError(
                    f"{path} is of another search: its {name} is {stored.get(name)!r}, now it is {value!r}; resume "
                    "with the same arguments, machine and version of encast, or remove the file"
                )
        # What the earlier run had begun: proposals still in the queue would be handed out first.
        begun = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        waiting = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
        for number in [*(trial.number for trial in begun), *(study.ask().number for _ in waiting)]:
            study.tell(number, state=optuna.trial.TrialState.FAIL)
        for point, seconds in dict(study.user_attrs.get("probes", {})).items():
            if not 0 < seconds < math.inf:
                raise ValueError(f"the probe {point} took {seconds} s")
        known = set(setups)
        try:
            trials = [
                Trial.from_json(trial.user_attrs["trial"])
                for trial in study.get_trials(deepcopy=False)
                if "trial" in trial.user_attrs
            ]
        except InputError as error:
            raise ValueError(error) from None
        return study, [trial for trial in trials if trial.setup in known]


def _cut_to_whole_lines(path: Path) -> None:
    """A search that was killed may have left half a line at the end of its journal; takes it away."""
    data = path.read_bytes()
    first, _, _ = data.partition(b"\n")
    if not isinstance(json.loads(first), dict):
        raise ValueError("its first line is no entry")
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


@contextlib.contextmanager
def _journal_errors(path: Path | None) -> Iterator[None]:
    """Turns what Optuna raises for a damaged or unwritable journal into errors that say what to do."""
    try:
        yield
    except EncastError:
        raise
    except OSError as error:
        raise ResourceError(
            f"{path}: the journal of the search cannot be used ({error.strerror or error}); make room, or name another "
            "--out"
        ) from None
    except Exception as error:
        # Whatever a parser makes of lines that are none: KeyError, JSONDecodeError, ...
        raise InputError(
            f"{path} is no journal of `encast tune` ({type(error).__name__}: {str(error)[:200]}); remove it, or name "
            "another --out"
        ) from None
