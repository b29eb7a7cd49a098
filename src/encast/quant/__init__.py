"""Which numbers a compiled model computes with: plain data, and the rounding that makes narrow weights."""

from encast.quant.calibration import Calibration
from encast.quant.spec import QuantSpec

__all__ = ["Calibration", "QuantSpec"]
