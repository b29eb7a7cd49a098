"""What is to be served: artifacts, and checkpoints that are compiled first, into the cache directory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import encast.artifact as artifacts
from encast.artifact.card import CARD
from encast.ceilings.store import cache_dir
from encast.compile import compile
from encast.errors import ArtifactError, InputError, ResourceError
from encast.files import turn
from encast.importers.hub import choose_files, looks_like_hub_id, resolve_hub

__all__ = ["CompileProgress", "Source", "read_sources"]

CompileProgress = Callable[[str, int, int], None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_READ = 1 << 20


@dataclass(frozen=True)
class Source:
    """A model as the user named it. ``given``: an artifact's folder, a checkpoint's, or a hub id; ``compiled``: whether
    it must be compiled, as ``dtype``.
    """

    name: str
    given: str
    compiled: bool
    dtype: str
    aliases: tuple[str, ...] = ()

    def prepare(self, progress: CompileProgress | None = None) -> Path:
        """The folder of its artifact as it is now; compiles what was not compiled before. Raises ``EncastError``."""
        if not self.compiled:
            return Path(os.path.realpath(self.given))
        folder, revision = (Path(self.given), None) if os.path.isdir(self.given) else resolve_hub(self.given)
        key = hashlib.sha256()
        for part in (_version(), self.dtype, self.given if revision else "", revision or _digest(folder)):
            key.update(part.encode() + b"\0")
        try:
            home = cache_dir() / "served" / "artifacts"
            home.mkdir(parents=True, exist_ok=True)
            place = home / f"{Path(self.given).name}-{key.hexdigest()[:24]}.encast"
            # The second of two servers that start at once waits for the first one's artifact.
            with turn(home / f"{place.name}.lock"):
                if not _whole(place):
                    compile(self.given, place, dtype=self.dtype, progress=progress)
        except OSError as error:
            raise ResourceError(
                f"the cache for compiled models cannot be written: {error}; set ENCAST_CACHE_DIR to a folder, or run "
                "`encast compile` and serve its artifact"
            ) from None
        return place


def read_sources(given: Sequence[str], aliases: Sequence[str], dtype: str | None) -> list[Source]:
    """The models of a command line: each ``[NAME=]SOURCE``, and ``NAME=MODEL`` of aliases. ``dtype``: of those that are
    compiled, None for int8. Raises ``InputError``.
    """
    names: dict[str, tuple[str, bool]] = {}
    for text in given:
        name, source = _named(text)
        if name in names:
            raise InputError(f"two models are called {name!r}; give one another name, as NAME={source}")
        names[name] = source, _needs_compiling(source)
    if dtype is not None and not any(compiled for _, compiled in names.values()):
        raise InputError("--dtype is for checkpoints that are compiled first; all that is given is compiled already")
    also: dict[str, list[str]] = {name: [] for name in names}
    taken = set(names)
    for text in aliases:
        alias, equals, model = text.partition("=")
        if not equals or not _NAME.fullmatch(alias):
            raise InputError(
                f"--alias {text!r}: NAME=MODEL is needed, as in text-embedding-3-small={next(iter(names))}"
            )
        if model not in names:
            raise InputError(f"--alias {text!r}: there is no model {model!r}; served are {', '.join(names)}")
        if alias in taken:
            raise InputError(f"--alias {text!r}: a model or another alias is called {alias!r} already")
        taken.add(alias)
        also[model].append(alias)
    return [
        Source(name, source, compiled, dtype or "int8", tuple(also[name])) for name, (source, compiled) in names.items()
    ]


def _named(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not equals or os.path.lexists(text):
        source, name = text, Path(os.path.abspath(text)).name.removesuffix(".encast")
    if not source or "\0" in source or not _NAME.fullmatch(name):
        raise InputError(
            f"{text!r} gives a model no usable name; write NAME=PATH with a NAME of letters, digits and any of . _ - /"
        )
    return name, source


def _needs_compiling(source: str) -> bool:
    """Whether it is a checkpoint or hub id; raises ``InputError`` for what is nothing of the kind."""
    if os.path.isdir(source):
        return not os.path.exists(os.path.join(source, CARD))
    if os.path.lexists(source) or source.endswith(".encast") or not looks_like_hub_id(source):
        raise InputError(
            f"{source!r} is no folder and no hub id; give an artifact that `encast compile` wrote, a checkpoint folder "
            "or owner/name"
        )
    return True


def _digest(folder: Path) -> str:
    """Of the names and contents of the files that a compilation reads."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in choose_files(names):
        content = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while block := file.read(_READ):
                content.update(block)
        digest.update(name.encode(errors="surrogateescape") + b"\0" + content.digest())
    return digest.hexdigest()


def _whole(place: Path) -> bool:
    try:
        artifacts.open(place)
    except ArtifactError:
        return False
    return True


def _version() -> str:
    try:
        return importlib.metadata.version("encast")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"
