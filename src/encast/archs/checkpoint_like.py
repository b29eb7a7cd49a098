"""The part of ``importers``' ``Checkpoint`` that architectures read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from encast.archs.export_like import ExportLike
from encast.archs.heads import M3Heads, SentenceModules
from encast.archs.weights import TensorSource
from encast.ir.meta import TokenForm

__all__ = ["CheckpointLike"]


class CheckpointLike(Protocol):
    """What ``open_checkpoint`` returns, see ARCHITECTURE.md."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def config_file(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def tensors(self) -> TensorSource: ...

    @property
    def modules(self) -> SentenceModules | None: ...

    @property
    def export(self) -> ExportLike | None: ...

    @property
    def token_form(self) -> TokenForm | None: ...

    @property
    def m3(self) -> M3Heads | None: ...
