"""What an engine can do with texts: one file a task."""

from encast.tasks.answer import Answer, answer
from encast.tasks.classify import Classification, classify
from encast.tasks.embed import embed
from encast.tasks.fill_mask import Candidate, fill_mask
from encast.tasks.rerank import rerank
from encast.tasks.session import Session
from encast.tasks.tag import Entity, Tagging, TokenLabel, tag
from encast.tasks.tokenize import Tokenizer

__all__ = [
    "Answer",
    "Candidate",
    "Classification",
    "Entity",
    "Session",
    "Tagging",
    "TokenLabel",
    "Tokenizer",
    "answer",
    "classify",
    "embed",
    "fill_mask",
    "rerank",
    "tag",
]
