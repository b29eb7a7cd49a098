"""An artifact beside the runtime of the file that it was made of: ``encast compile --verify``."""

from encast.verify.compare import LIMITS, NotComparedError, installed, verify_onnx

__all__ = ["LIMITS", "NotComparedError", "installed", "verify_onnx"]
