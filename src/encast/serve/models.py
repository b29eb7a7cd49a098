"""The models of a server as a front sees them: names, facts and tokenizers, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from encast.serve.errors import RefusalError
from encast.tasks.session import F32, Run, Session

__all__ = ["Models", "Runner", "ServedModel", "Timing"]


@dataclass
class Timing:
    """What one request took, in seconds, summed over its runs; for its headers, metrics and log line."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    tokens: int = 0
    texts: int = 0
    batch_tokens: int = 0
    """Tokens of the largest batch that it was a part of."""


class Runner(Protocol):
    """What computes: an engine in another process, or, in tests, in this one."""

    async def run(self, run: Run, *, arrived: float, deadline: float, before: int, size: int, timing: Timing) -> F32:
        """The rows that the run asks for, as ``Runnable.run`` gives them; adds to ``timing``.

        ``arrived``, ``deadline``: seconds of ``time.monotonic``; ``before``: tokens of the request's earlier runs;
        ``size``: bytes of its body.
        Raises ``RefusalError``, and ``InputError`` for what the model refuses. Cancelling the task withdraws the run.
        """
        ...

    @property
    def backlog_s(self) -> float:
        """How many seconds a run would now wait: what was last heard, less the time since then."""
        ...

    def full(self, size: int) -> bool:
        """Whether a new request whose body has so many bytes would be refused: one like it has just been."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """A model under its name. ``sha256``: of its card, which names every checksum; ``dtype``: of its products;
    ``created``: seconds since 1970 at which it was compiled.
    """

    name: str
    session: Session
    runner: Runner
    sha256: str
    dtype: str
    created: int
    source: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """What it was compiled for, see ``encast.ir.meta.HEADS``."""
        return self.session.meta.task

    def can(self, *tasks: str) -> bool:
        """See ``GraphMeta.can``."""
        return self.session.meta.can(*tasks)

    @property
    def reranks(self) -> bool:
        """Whether it scores pairs with one number."""
        return self.task == "classify" and len(self.session.meta.labels or ()) == 1


@dataclass(frozen=True)
class Models:
    """All that are served, in the order of the command line. Replaced as a whole by a reload."""

    by_name: Mapping[str, ServedModel]
    _aliases: Mapping[str, ServedModel] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        aliases = {alias: model for model in self.by_name.values() for alias in (model.name, *model.aliases)}
        object.__setattr__(self, "_aliases", aliases)

    def find(self, name: str | None, *tasks: str) -> ServedModel:
        """The model of that name or alias; for None, of protocols that name no model, the first that can do one of
        ``tasks``. Raises ``RefusalError``: "not_found" for an unknown name, "unsupported" without such a task.
        """
        if name is None:
            for model in self.by_name.values():
                if not tasks or model.can(*tasks):
                    return model
            have = ", ".join(f"{model.name} ({model.task})" for model in self.by_name.values())
            raise RefusalError("unsupported", f"no model here can do {' or '.join(tasks)}; served are {have}")
        model_or_none = self._aliases.get(name)
        if model_or_none is None:
            raise RefusalError(
                "not_found", f"there is no model {name[:100]!r}; served are {', '.join(self._aliases)}", field="model"
            )
        if tasks and not model_or_none.can(*tasks):
            raise RefusalError(
                "unsupported",
                f"the model {name!r} was compiled for {model_or_none.task}, this needs {' or '.join(tasks)}",
                field="model",
            )
        return model_or_none
