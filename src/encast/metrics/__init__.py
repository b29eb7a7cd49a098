"""Task metrics, NumPy alone. Fractions of 1, unless a function says otherwise."""

from encast.metrics.classification import accuracy, f1_binary, f1_macro, matthews
from encast.metrics.correlation import pearson, spearman
from encast.metrics.entities import EntityScore, entity_f1, entity_spans, is_bio
from encast.metrics.retrieval import first_ranks, retrieval_scores
from encast.metrics.squad import squad_scores
from encast.metrics.vectors import cosines, kl_divergence

__all__ = [
    "EntityScore",
    "accuracy",
    "cosines",
    "entity_f1",
    "entity_spans",
    "f1_binary",
    "f1_macro",
    "first_ranks",
    "is_bio",
    "kl_divergence",
    "matthews",
    "pearson",
    "retrieval_scores",
    "spearman",
    "squad_scores",
]
