"""Rewrites of the graph, one a file, and the pipeline that runs them in order."""

from encast.passes.choose_sparse import SPARSE
from encast.passes.pipeline import optimise
from encast.passes.report import FusionReport, Miss
from encast.passes.stored_ranges import count_fixed, stored_ranges

__all__ = ["SPARSE", "FusionReport", "Miss", "count_fixed", "optimise", "stored_ranges"]
