"""Models of token embeddings (ColBERT, arXiv 2004.12832): how their checkpoints say what becomes of a text.

Two layouts are read: that of PyLate (``modules.json`` with dense layers on the tokens, and
``config_sentence_transformers.json``) and that of stanford-futuredata/ColBERT (``HF_ColBERT``: ``linear.weight`` beside
the encoder, and ``artifact.metadata``). What is missing in PyLate's has the defaults of PyLate.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.dense_module import DenseModule, check_fields, flag, read_dense
from encast.importers.files import Folder, quote
from encast.importers.tokenizer_build import guarded
from encast.ir.meta import TokenForm

__all__ = ["METADATA", "STANFORD", "LateInteraction", "read_pylate", "read_stanford", "token_form"]

STANFORD = "HF_ColBERT"
"""What stanford-futuredata/ColBERT writes into ``architectures``."""

METADATA = "artifact.metadata"

_IDENTITY = "torch.nn.modules.linear.Identity"

_PYLATE = {
    "query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion",
    "attend_to_expansion_tokens", "skiplist_words",
}  # fmt: skip
_SENTENCE = {"__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"}

# Of colbert/infra/config/settings.py: where and how a model was trained, and how an index is made and searched.
_ELSEWHERE = {
    "overwrite", "root", "experiment", "index_root", "name", "rank", "nranks", "amp", "total_visible_gpus", "gpus",
    "avoid_fork_if_possible", "checkpoint", "triples", "collection", "queries", "index_name", "bsize", "accumsteps",
    "lr", "maxsteps", "save_every", "resume", "warmup", "warmup_bert", "nway", "use_ib_negatives",
    "distillation_alpha", "ignore_scores", "model_name", "index_path", "index_bsize", "nbits", "kmeans_niters",
    "ncells", "centroid_score_threshold", "ndocs", "load_index_with_mmap", "pool_factor", "clustering_mode",
    "protected_tokens", "meta",
}  # fmt: skip
# What the markers are called in its logs; their ids are what counts.
_NAMES = {"query_token", "doc_token"}
_SWITCHES: Mapping[str, Any] = {"similarity": "cosine", "interaction": "colbert", "relu": False, "reranker": False}
_READ = {
    "query_token_id", "doc_token_id", "query_maxlen", "doc_maxlen", "dim", "mask_punctuation", "attend_to_mask_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class LateInteraction:
    """What stands behind the encoder, and what is done with texts.

    ``dense``: layers on the last hidden state of every token, in order; with ``dim`` that is instead the tensor
    ``linear.weight: f32[dim, hidden]`` of the checkpoint. Vectors are scaled to length 1 afterwards. A marker is a
    token that follows the first one, "" for none; ``query_length`` and ``document_length`` bound the tokens of a text,
    special ones and the marker included. ``expand``: whether queries are filled up to their length with mask tokens;
    ``attend``: whether the other tokens see those. ``skip``: words whose tokens a document has no vectors of, by their
    own id, or with ``first_piece`` by that of the first token that the tokenizer makes of them. ``placeholder``: see
    ``TokenForm``.
    """

    dense: tuple[DenseModule, ...]
    dim: int | None
    query_marker: str
    document_marker: str
    query_length: int
    document_length: int
    expand: bool
    attend: bool
    skip: tuple[str, ...]
    first_piece: bool
    placeholder: str = ""

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is embedded."""
        return max(self.query_length, self.document_length)


def read_pylate(root: Folder, settings: str, modules: Sequence[Folder]) -> LateInteraction:
    """Of the file ``settings`` of a PyLate folder and the folders of its dense modules.

    Raises ``CheckpointError`` for files that are missing or damaged, ``UnsupportedModelError`` for what encast does not
    have.
    """
    where = str(root.path(settings))
    if not root.has(settings):
        raise CheckpointError(
            f"{where} is missing; it says the prefixes and lengths of queries and documents, as save_pretrained of "
            "PyLate writes it"
        )
    config = root.object(settings)
    check_fields(config, _PYLATE | _SENTENCE, where)
    for name, accepted in (("similarity_fn_name", ("MaxSim",)), ("model_type", ("ColBERT", "SentenceTransformer"))):
        if config.get(name) is not None and config[name] not in accepted:
            raise UnsupportedModelError(f"{where}: {name} is {quote(config[name])}; supported: {', '.join(accepted)}")
    words = config.get("skiplist_words")
    if words is None:
        words = list(string.punctuation)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"{where}: skiplist_words must be a list of texts")
    expand = flag(config, "do_query_expansion", True, where)
    return LateInteraction(
        dense=tuple(read_dense(folder, of="token_embeddings", default=_IDENTITY) for folder in modules),
        dim=None,
        query_marker=_text(config, "query_prefix", "[Q] ", where),
        document_marker=_text(config, "document_prefix", "[D] ", where),
        query_length=_count(config, "query_length", where, default=32),
        document_length=_count(config, "document_length", where, default=180),
        expand=expand,
        attend=flag(config, "attend_to_expansion_tokens", False, where),
        skip=tuple(words),
        first_piece=False,
    )


def read_stanford(folder: Folder) -> LateInteraction:
    """Of ``artifact.metadata`` beside the weights of an ``HF_ColBERT``; raises as ``read_pylate`` does."""
    where = str(folder.path(METADATA))
    if not folder.has(METADATA):
        raise CheckpointError(
            f"{where} is missing; it says the markers, lengths and the projection of a {STANFORD} checkpoint, with the "
            f"fields {', '.join(sorted(_READ))}"
        )
    config = folder.object(METADATA)
    check_fields(config, _ELSEWHERE | _NAMES | _READ | _SWITCHES.keys(), where)
    for name in sorted(_READ):
        if config.get(name) is None:
            raise CheckpointError(f"{where}: {name} is missing; what a query or a document is depends on it")
    for name, supported in _SWITCHES.items():
        if config.get(name, supported) != supported:
            raise UnsupportedModelError(f"{where}: {name} is {quote(config[name])}; supported: {supported}")
    return LateInteraction(
        dense=(),
        dim=_count(config, "dim", where, least=1),
        query_marker=_marker(config, "query_token_id", where),
        document_marker=_marker(config, "doc_token_id", where),
        query_length=_count(config, "query_maxlen", where),
        document_length=_count(config, "doc_maxlen", where),
        expand=True,
        attend=flag(config, "attend_to_mask_tokens", False, where),
        skip=tuple(string.punctuation) if flag(config, "mask_punctuation", True, where) else (),
        first_piece=True,
        # QueryTokenizer and DocTokenizer of the published code put it before each text, and the marker over its token.
        placeholder=". ",
    )


def token_form(late: LateInteraction, tokenizer_json: str, special: Mapping[str, str], where: str) -> TokenForm:
    """``late`` in ids of a tokenizer whose special tokens are ``special`` (role to token).

    Raises ``CheckpointError`` for a marker, a mask or a word of the skiplist that the tokenizer lacks.
    """
    with guarded(where):
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()

    def marker(token: str, of: str) -> int | None:
        if not token:
            return None
        found: int | None = tokenizer.token_to_id(token)
        if found is None:
            raise CheckpointError(
                f"{where}: the tokenizer has no token {token!r}, which marks {of}; take the tokenizer that was saved "
                "with the model"
            )
        return found

    expansion: int | None = None
    if late.expand:
        expansion = tokenizer.token_to_id(special["mask"]) if "mask" in special else None
        if expansion is None:
            raise CheckpointError(
                f"{where}: the tokenizer has no mask token, with which queries are filled up; take the tokenizer that "
                "was saved with the model, or set do_query_expansion to false if it was trained so"
            )
    query_marker = marker(late.query_marker, "queries")
    most_unseen = 0
    if late.expand and not late.attend:
        with guarded(where):
            plain = tokenizer.encode("a")
        added = plain.special_tokens_mask
        if len(added) < 2 or not (added[0] and added[-1]) or plain.ids[-1] == expansion:
            raise UnsupportedModelError(
                f"{where}: queries are filled up with masks that other tokens do not see, which needs a tokenizer that "
                "puts special tokens before and after a text; this one does not. If the model was trained so, set "
                "do_query_expansion to false or attend_to_expansion_tokens (attend_to_mask_tokens) to true"
            )
        most_unseen = late.query_length - sum(added) - (query_marker is not None)
    unknown = tokenizer.token_to_id(special["unk"]) if "unk" in special else None
    skip: set[int] = set()
    for word in late.skip:
        if late.first_piece:
            with guarded(where):
                found = next(iter(tokenizer.encode(word, add_special_tokens=False).ids), None)
        else:
            # As convert_tokens_to_ids of transformers: a word that is no token counts as the unknown one.
            found = tokenizer.token_to_id(word)
            found = unknown if found is None else found
        if found is None:
            raise CheckpointError(f"{where}: {word!r} is to be skipped, and the tokenizer makes no token of it")
        skip.add(found)
    return TokenForm(
        query_marker=query_marker,
        document_marker=marker(late.document_marker, "documents"),
        query_length=late.query_length,
        document_length=late.document_length,
        expansion=expansion,
        most_unseen=max(most_unseen, 0),
        skip=tuple(sorted(skip)),
        placeholder=late.placeholder,
    )


def _text(config: Mapping[str, Any], name: str, default: str, where: str) -> str:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: {name} must be a text")
    return value


def _marker(config: Mapping[str, Any], name: str, where: str) -> str:
    if not (found := _text(config, name, "", where)):
        raise CheckpointError(f"{where}: {name} is empty; the token that marks a text is needed")
    return found


def _count(config: Mapping[str, Any], name: str, where: str, *, least: int = 3, default: int | None = None) -> int:
    """A length has place for the first token, a marker and a last one."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not (type(value) is int and value >= least):
        raise CheckpointError(f"{where}: {name} must be a whole number from {least} on")
    return value
