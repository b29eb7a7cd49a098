"""encast compiles BERT-family encoders and runs them.

The public names load on first use, so that ``import encast`` stays quick and pulls in nothing heavy.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encast.batch import Batch as Batch
    from encast.calibrate import calibrate as calibrate
    from encast.compile import compile as compile
    from encast.engine import Engine as Engine
    from encast.engine import load as load
    from encast.errors import ArtifactError as ArtifactError
    from encast.errors import CheckpointError as CheckpointError
    from encast.errors import EncastError as EncastError
    from encast.errors import GraphError as GraphError
    from encast.errors import InputError as InputError
    from encast.errors import PlanError as PlanError
    from encast.errors import ResourceError as ResourceError
    from encast.errors import StrictError as StrictError
    from encast.errors import UnsupportedModelError as UnsupportedModelError
    from encast.quant import Calibration as Calibration
    from encast.quant import QuantSpec as QuantSpec

    __version__: str

_HOMES = {
    "ArtifactError": "encast.errors",
    "Batch": "encast.batch",
    "Calibration": "encast.quant",
    "CheckpointError": "encast.errors",
    "EncastError": "encast.errors",
    "Engine": "encast.engine",
    "GraphError": "encast.errors",
    "InputError": "encast.errors",
    "PlanError": "encast.errors",
    "QuantSpec": "encast.quant",
    "ResourceError": "encast.errors",
    "StrictError": "encast.errors",
    "UnsupportedModelError": "encast.errors",
    "calibrate": "encast.calibrate",
    "compile": "encast.compile",
    "load": "encast.engine",
}

__all__ = [
    *_HOMES,
    "__version__",
]


class _Package(types.ModuleType):
    """The package, in which ``compile`` and ``calibrate`` stay functions once modules of those names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("calibrate", "compile") and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("encast")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return "0+unknown"
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'encast' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
