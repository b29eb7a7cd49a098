"""An artifact beside the runtime of what it was made of: ``encast compile --verify``."""

from encast.verify.apart import NotComparedError
from encast.verify.compare import LIMITS, verify
from encast.verify.original import ONNX_RUNTIME, TENSORFLOW, UNUSED, Original, Runtime, Takes
from encast.verify.shake import shaken

__all__ = [
    "LIMITS",
    "ONNX_RUNTIME",
    "TENSORFLOW",
    "UNUSED",
    "NotComparedError",
    "Original",
    "Runtime",
    "Takes",
    "shaken",
    "verify",
]
