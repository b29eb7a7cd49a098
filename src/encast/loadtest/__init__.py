"""Load tests of embedding and rerank servers: ``run`` does what a ``Plan`` says and returns a ``Result``."""

from encast.loadtest.plan import ClosedLoop, OpenLoop, Plan, Ramp
from encast.loadtest.requests import Source, of_lengths, of_rankings, of_texts
from encast.loadtest.result import Result, Step
from encast.loadtest.run import run

__all__ = [
    "ClosedLoop",
    "OpenLoop",
    "Plan",
    "Ramp",
    "Result",
    "Source",
    "Step",
    "of_lengths",
    "of_rankings",
    "of_texts",
    "run",
]
