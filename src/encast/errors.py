"""The tree of errors that encast raises on purpose.

Every message says what is wrong, where (file, tensor, layer, offset, line), what
would have been accepted, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "EncastError",
    "GraphError",
    "InputError",
    "PlanError",
    "ResourceError",
    "StrictError",
    "UndefinedError",
    "UnsupportedModelError",
    "install_hint",
    "need_modules",
    "translated",
]


class EncastError(Exception):
    """Base of every error that encast raises on purpose."""


class CheckpointError(EncastError):
    """A checkpoint folder is damaged, incomplete or contradicts itself."""


class UnsupportedModelError(EncastError):
    """A checkpoint is well-formed, but asks for arithmetic that encast does not have."""


class GraphError(EncastError):
    """A graph breaks a rule of the op table; a defect of encast, not of the input."""


class ArtifactError(EncastError):
    """A compiled artifact is damaged, incomplete or written by another version."""


class PlanError(EncastError):
    """A plan breaks a rule of the plan schema."""


class InputError(EncastError, ValueError):
    """A request (text, token ids, file row, option) cannot be served as it stands."""


class UndefinedError(InputError):
    """What was asked for has no number: the answers overflow, or are all equal where that leaves nothing to measure."""


class ResourceError(EncastError):
    """The machine lacks something that was asked for: memory, disk, processor feature."""


class StrictError(EncastError):
    """Something fell back while ``strict`` was asked for."""


def install_hint(extra: str) -> str:
    """The command that adds one of encast's extras to an installed encast, editable or not."""
    return f"pip install 'encast[{extra}]'"


def need_modules(extra: str, *modules: str) -> None:
    """Raises ``InputError`` where one that the extra installs is not there. None is imported, which may take long."""
    if absent := [name for name in modules if find_spec(name) is None]:
        raise InputError(f"not installed: {', '.join(absent)}; {install_hint(extra)}")


@contextmanager
def translated(make: Callable[[str], EncastError]) -> Iterator[None]:
    """Turns what a library written in Rust raises, its panics included, into what ``make`` makes of the first line."""
    try:
        yield
    except EncastError:
        raise
    except BaseException as error:
        # A panic arrives as pyo3's PanicException, which is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise make((str(error).strip().splitlines() or [type(error).__name__])[0][:300]) from error
