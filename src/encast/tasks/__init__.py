"""What an engine can do with texts: one file a task. The tasks are generators that ask for runs of the model."""

from encast.tasks.answer import Answer, answer
from encast.tasks.classify import Classification, classify
from encast.tasks.embed import embed, embed_ids
from encast.tasks.embed_m3 import M3Embedding, embed_m3
from encast.tasks.embed_sparse import SparseVector, embed_sparse
from encast.tasks.embed_tokens import TokenVectors, embed_tokens, max_sim
from encast.tasks.features import hidden_states
from encast.tasks.fill_mask import Candidate, fill_mask
from encast.tasks.rerank import rerank
from encast.tasks.session import Run, Runs, Session, Steps, drive
from encast.tasks.tag import Entity, Tagging, TokenLabel, tag
from encast.tasks.tokenize import Tokenizer

__all__ = [
    "Answer",
    "Candidate",
    "Classification",
    "Entity",
    "M3Embedding",
    "Run",
    "Runs",
    "Session",
    "SparseVector",
    "Steps",
    "Tagging",
    "TokenLabel",
    "TokenVectors",
    "Tokenizer",
    "answer",
    "classify",
    "drive",
    "embed",
    "embed_ids",
    "embed_m3",
    "embed_sparse",
    "embed_tokens",
    "fill_mask",
    "hidden_states",
    "max_sim",
    "rerank",
    "tag",
]
