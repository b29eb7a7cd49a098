"""The engine: a loaded artifact, from token ids or texts to answers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from encast.backends.base import Runnable, check_request
from encast.backends.devices import card_names, find_devices, is_card
from encast.batch import Batch, int32_vector
from encast.errors import ArtifactError, InputError, StrictError
from encast.ir.meta import SPLADE_ACTIVATIONS, TokenForm
from encast.ir.types import ValueType
from encast.tasks.answer import Answer, answer
from encast.tasks.classify import Classification, classify
from encast.tasks.embed import embed
from encast.tasks.embed_m3 import M3Embedding, embed_m3
from encast.tasks.embed_sparse import SparseVector, embed_sparse
from encast.tasks.embed_tokens import Kind, TokenVectors, embed_tokens
from encast.tasks.fill_mask import Candidate, fill_mask
from encast.tasks.pooling import Pooling
from encast.tasks.rerank import rerank
from encast.tasks.session import F32, Piece, Runs, Session, Steps, drive, need_count
from encast.tasks.tag import Tagging, tag
from encast.tasks.tokenize import OnLong, Tokenizer

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from encast.artifact import Artifact
    from encast.backends.groups import Setup

__all__ = ["BATCH_TOKENS", "Engine", "load", "session_of", "tokenizer_of"]

T = TypeVar("T")

BATCH_TOKENS = 8192
"""Tokens of one run: enough to keep every core busy, little enough that Ctrl-C is heard within seconds."""


class Engine:
    """Answers for texts and token ids; a context manager, and safe to use from any number of threads.

    Bits of an answer depend on its text and the artifact, never on the other texts of a call. Every
    method returns answers in the order of its input and gives an empty result for an empty list.
    Methods raise ``InputError`` for input that cannot be served, naming its index, and when the artifact
    lacks the head that they need. Texts longer than ``max_length`` tokens are cut as the checkpoint's
    tokenizer says, or raise with ``on_long="error"``.

    With ``on_long="windows"`` nothing is cut off: ``embed``, ``embed_sparse``, ``classify``, ``rerank`` and ``tag``
    read a longer text in windows of its tokens, each with the special tokens and the prompt, and make one answer of
    theirs. Neighbouring windows share ``stride`` tokens of the text: 0 or more and fewer than a window holds, by
    default 128, or half of a window when that is less, as in ``answer``. ``pooling``: "mean", weighted by the tokens of
    the text in each window, or "max", the largest of each number. A text that fits has the same bits as when texts are
    cut.
    """

    def __init__(self, session: Session, runnable: Runnable) -> None:
        self.meta, self.dim = session.meta, session.dim
        self._open: tuple[Session, Runnable] | None = session, runnable
        self._closing = threading.Lock()

    @property
    def task(self) -> str:
        """What the artifact was compiled for, one of ``encast.ir.meta.HEADS``: features, embed, classify, ..."""
        return self.meta.task

    @property
    def max_length(self) -> int:
        """Tokens, special ones included, after which a text is cut."""
        return self.session.tokenizer.max_length

    @property
    def session(self) -> Session:
        """What the functions of ``encast.tasks`` work with; raises ``InputError`` once the engine is closed."""
        return self._parts()[0]

    @property
    def runnable(self) -> Runnable:
        """The model as its device runs it; raises ``InputError`` once the engine is closed."""
        return self._parts()[1]

    @property
    def at_once(self) -> int:
        """How many calls, each of a thread of its own, keep it busy: one an instance, two a card."""
        return getattr(self.runnable, "at_once", 1)

    def _parts(self) -> tuple[Session, Runnable]:
        parts = self._open
        if parts is None:
            raise InputError("the engine is closed; load the artifact again")
        return parts

    def drive(self, steps: Steps[T]) -> T:
        """The answer of a function of ``encast.tasks``, all of whose runs happen in this call."""
        return drive(*self._parts(), steps)

    # Token ids

    def forward(
        self, token_ids: Sequence[Sequence[int]], token_type_ids: Sequence[Sequence[int]] | None = None
    ) -> list[F32]:
        """Last hidden states, ``f32[len_i, hidden]`` a sequence. Ids are taken as they are: no special tokens added."""
        batch = Batch.of(token_ids, token_type_ids)
        if batch.tokens > self.session.batch_tokens:
            # Each run checks its own part; of several, none begins before all are known to be good.
            self._check(batch)
        return self.drive(_states(batch, self.session.batch_tokens))

    def forward_packed(self, token_ids: Any, cu_seqlens: Any, token_type_ids: Any | None = None) -> F32:
        """Last hidden states ``f32[tokens, hidden]`` of sequences that lie one after the other.

        ``token_ids: i32[tokens]``, ``cu_seqlens: i32[n+1]``, ``token_type_ids: i32[tokens]``. Contiguous int32
        arrays are read in place; other integers are converted. The whole batch is one run.
        """
        types = None if token_type_ids is None else int32_vector("token_type_ids", token_type_ids)
        batch = Batch(int32_vector("token_ids", token_ids), int32_vector("cu_seqlens", cu_seqlens), types)
        if batch.seqs == 0:
            self._check(batch)
            return np.empty((0, self.meta.hidden), np.float32)
        return self.runnable.run("last_hidden_state", batch)

    def _check(self, batch: Batch) -> None:
        states = ValueType("f32", ("tokens", self.meta.hidden))
        check_request(self.meta, {"last_hidden_state": states}, "last_hidden_state", batch)

    # Texts

    def embed(
        self,
        texts: Sequence[str],
        *,
        on_long: OnLong = "truncate",
        stride: int | None = None,
        pooling: Pooling | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> F32:
        """Sentence embeddings ``f32[n, dim]``, pooled and normalised as the checkpoint says.

        The checkpoint's prompt of that name goes before every text: its default for None, none for "".
        ``truncate_dim``: only so many of the first numbers, ``f32[n, truncate_dim]``, for models that were trained for
        it (Matryoshka representation learning, arXiv 2205.13147). Where the checkpoint normalises, they are scaled to
        length 1 again, which sentence-transformers does only when asked.

        Of windows, with vectors ``v_i`` and ``n_i`` tokens of the text in each, ``pooling`` "mean" (the default) gives
        ``sum(n_i v_i) / sum(n_i)``, "max" the largest of each number. That is scaled to length 1 where the checkpoint
        normalises, and ``truncate_dim`` comes last.
        """
        return self.drive(
            embed(
                self.session,
                texts,
                on_long=on_long,
                stride=stride,
                pooling=pooling,
                prompt_name=prompt_name,
                truncate_dim=truncate_dim,
            )
        )

    def embed_sparse(
        self,
        texts: Sequence[str],
        *,
        on_long: OnLong = "truncate",
        stride: int | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
    ) -> list[SparseVector]:
        """Sparse embeddings: for every text the tokens of the vocabulary that weigh more than 0, and their weights.

        They are those of SPLADE, see ``encast.tasks.embed_sparse.embed_sparse``. Prompts are as in ``embed``.
        ``max_active_dims``: only so many of the largest weights of a text; by default as the checkpoint says, else all.
        Of windows each token of the vocabulary has its largest weight in any of them.
        """
        return self.drive(
            embed_sparse(
                self.session,
                texts,
                on_long=on_long,
                stride=stride,
                prompt_name=prompt_name,
                max_active_dims=max_active_dims,
            )
        )

    def embed_tokens(
        self,
        texts: Sequence[str],
        *,
        kind: Kind = "document",
        on_long: OnLong = "truncate",
        prompt_name: str | None = None,
    ) -> list[TokenVectors]:
        """Embeddings of tokens: for every text ``f32[tokens, dim]``, vectors of length 1, and the id of each token.

        ``kind``: "query" or "document", which the model reads differently, see
        ``encast.tasks.embed_tokens.embed_tokens``. ``encast.tasks.max_sim`` scores a document for a query. Prompts are
        as in ``embed``.
        """
        return self.drive(embed_tokens(self.session, texts, kind=kind, on_long=on_long, prompt_name=prompt_name))

    def embed_m3(
        self,
        texts: Sequence[str],
        *,
        on_long: OnLong = "truncate",
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
    ) -> list[M3Embedding]:
        """BGE-M3's embedding, sparse embedding and embeddings of tokens of every text, in one run of the model.

        They have the bits of ``embed``, ``embed_sparse`` and ``embed_tokens``, and so have the options; an artifact of
        this task can do those too.
        """
        return self.drive(
            embed_m3(self.session, texts, on_long=on_long, prompt_name=prompt_name, max_active_dims=max_active_dims)
        )

    def classify(
        self,
        texts_or_pairs: Sequence[str] | Sequence[tuple[str, str]],
        *,
        on_long: OnLong = "truncate",
        stride: int | None = None,
        pooling: Pooling | None = None,
    ) -> list[Classification]:
        """A label with its score, and the scores of all labels, for every text or pair of texts.

        Of windows with scores ``p_i`` and ``n_i`` tokens of the text in each, ``pooling`` "mean" (the default) gives
        ``sum(n_i p_i) / sum(n_i)``, "max" the largest score of each label in any window; those need not sum to 1. Of a
        pair the second text is read in windows, each with the whole first text, which must leave room for it.
        """
        return self.drive(classify(self.session, texts_or_pairs, on_long=on_long, stride=stride, pooling=pooling))

    @overload
    def answer(
        self,
        question: str,
        context: str,
        *,
        stride: int | None = ...,
        max_answer_len: int = ...,
        n_best: int = ...,
        null_threshold: float | None = ...,
    ) -> Answer: ...

    @overload
    def answer(
        self,
        question: list[str] | tuple[str, ...],
        context: list[str] | tuple[str, ...],
        *,
        stride: int | None = ...,
        max_answer_len: int = ...,
        n_best: int = ...,
        null_threshold: float | None = ...,
    ) -> list[Answer]: ...

    def answer(
        self,
        question: str | list[str] | tuple[str, ...],
        context: str | list[str] | tuple[str, ...],
        *,
        stride: int | None = None,
        max_answer_len: int = 30,
        n_best: int = 20,
        null_threshold: float | None = None,
    ) -> Answer | list[Answer]:
        """The best span of the context: one ``Answer`` for two texts, a list for two lists of equal length.

        A context longer than the model reads is split into windows that share ``stride`` tokens. The span
        with the largest sum of start and end logit wins, over all windows, among spans inside of the context
        of at most ``max_answer_len`` tokens; of equals, the first. Its score is a softmax over the
        ``n_best`` spans. An empty context gives an empty answer with score 0.

        With a ``null_threshold`` (0 is the usual one) the answer is "" when there being none scores higher than the
        best span by more than that: the sum of start and end logit at the first token, [CLS], the least over all
        windows, as BERT's ``run_squad.py`` has it for SQuAD 2.0. It then counts as one more span in the softmax.
        """
        return self.drive(
            answer(
                self.session,
                question,
                context,
                stride=stride,
                max_answer_len=max_answer_len,
                n_best=n_best,
                null_threshold=null_threshold,
            )
        )

    def tag(self, texts: Sequence[str], *, on_long: OnLong = "truncate", stride: int | None = None) -> list[Tagging]:
        """Entities with character offsets, as transformers' pipeline finds them; see ``encast.tasks.tag.tag``.

        Of windows that share a token, the one in which it has most context on its side with less labels it.
        """
        return self.drive(tag(self.session, texts, on_long=on_long, stride=stride))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        on_long: OnLong = "truncate",
        stride: int | None = None,
        pooling: Pooling | None = None,
    ) -> list[tuple[int, float]]:
        """``(index of the document, score)``, best first, equal scores by index.

        A classifier of pairs with one label (cross-encoder) scores with its logit; a sentence-embedding
        artifact with its checkpoint's similarity, cosine when it names none; one of embeddings of tokens with
        ``encast.tasks.max_sim``. Raises ``InputError`` for other artifacts.

        Of windows of a document, each with the whole query, a cross-encoder's score is the best one's (``pooling``
        "max", the default: MaxP of Dai and Callan, arXiv 1905.09217) or their weighted mean. Sentence embeddings are
        pooled as in ``embed``, those of query and documents. Embeddings of tokens take no windows.
        """
        return self.drive(rerank(self.session, query, documents, on_long=on_long, stride=stride, pooling=pooling))

    def fill_mask(
        self, texts: Sequence[str], *, top_k: int = 5, on_long: OnLong = "truncate"
    ) -> list[list[list[Candidate]]]:
        """For every text, for every mask in it, the ``top_k`` likeliest tokens, best first."""
        return self.drive(fill_mask(self.session, texts, top_k=top_k, on_long=on_long))

    # Life

    def close(self) -> None:
        """Frees threads and memory; later calls raise ``InputError``. Closing twice is fine."""
        with self._closing:
            parts, self._open = self._open, None
        if parts is not None:
            parts[1].close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load(
    artifact: str | os.PathLike[str],
    *,
    device: str | Sequence[str] = "cpu",
    threads: int | None = None,
    instances: int = 1,
    pin: bool = True,
    batch_tokens: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    strict: bool = False,
    dtype: str | None = None,
) -> Engine:
    """Opens a compiled artifact and readies it to run on this machine.

    ``device``: "cpu"; "cuda" (or "cuda:1", the second card) for a GPU, with PyTorch; "torch-cpu" for the GPU's steps on
    the CPU, to test them; "reference" for the slow NumPy float64 evaluation that the kernels are tested against.
    Several cards, ``["cuda:0", "cuda:1"]``, each have the model: the runs of a call, and those of calls from several
    threads, go to the card that is free first. Answers stay in order, and which texts share a run does not depend on
    the cards. They should be of one kind: others may round otherwise.
    ``dtype``, of a GPU: "f32", "f16", "bf16", "f8" or "f16-acc16" (f16, and products with weights summed in it), what
    values are stored and multiplied in; by default values are f32 and products as the artifact was compiled.
    ``threads`` per instance (default: the usable cores, divided by the instances); ``instances`` run
    calls of several threads side by side and share one copy of the weights; ``pin`` binds threads to
    cores, unless a CPU quota pays for fewer than the affinity mask has. ``batch_tokens``: tokens of one run
    (default: 8192).

    ``config``: what ``encast tune`` wrote, the file or its content. It says the instances, their threads and
    ``batch_tokens``, which the argument of that name overrules; a run goes to the first group of instances that covers
    its longest text. Of a card it says ``batch_tokens`` alone. A configuration that was tuned for another artifact, on
    another machine, card or number of cards, or with another dtype is a ``UserWarning``, with ``strict`` a
    ``StrictError``; one for a card is refused without, and the other way.

    Raises ``ArtifactError`` for a damaged artifact, ``InputError`` for options that cannot be
    met and ``ResourceError`` when the machine lacks something.
    """
    for name, value in (("threads", 1 if threads is None else threads), ("instances", instances)):
        need_count(name, value, 4096)
    settings = {"threads": threads, "instances": instances, "pin": pin, "config": config, "dtype": dtype}
    defaults = load.__kwdefaults__ or {}
    options: dict[str, Any] = {name: value for name, value in settings.items() if value != defaults[name]}
    chosen = find_devices(device, options)
    if config is not None and ("threads" in options or "instances" in options):
        raise InputError("config says the instances and their threads; leave threads and instances out")
    # Here and not above, so that importing encast stays quick.
    import encast.artifact as artifacts

    opened = artifacts.open(artifact)
    if config is not None:
        cards = [name for name in ([device] if isinstance(device, str) else device) if is_card(name)]
        options["config"] = setup = setup_of(opened, config, strict, cards=cards, dtype=dtype)
        batch_tokens = setup.batch_tokens if batch_tokens is None else batch_tokens
        if cards:
            del options["config"]
    with chosen.begin(opened) as begun:  # checksums are verified while the tokenizer is read
        return Engine(session_of(opened, batch_tokens), chosen.open(opened, **options, **begun))


def setup_of(
    opened: Artifact,
    config: str | os.PathLike[str] | Mapping[str, Any],
    strict: bool = False,
    *,
    cards: Sequence[str] = (),
    dtype: str | None = None,
) -> Setup:
    """The set-up of a configuration, for ``cards`` (devices) in values of ``dtype``, without any for the processor.

    Warns, or raises ``StrictError``, when it was tuned for something else; raises ``InputError`` for one for cards
    where there are none, and the other way.
    """
    from encast.tune.configuration import Cards, Configuration

    tuned = Configuration.of(config, batch_tokens=BATCH_TOKENS)
    tuned.need_kind(on_cards=bool(cards))
    strange = tuned.mismatches(opened, Cards(card_names(cards), dtype) if cards else None)
    if strange:
        message = f"{tuned.where}: {'; '.join(strange)}; run `encast tune` again"
        if strict:
            raise StrictError(message)
        warnings.warn(message, UserWarning, stacklevel=3)
    return tuned.chosen


def session_of(opened: Artifact, batch_tokens: int | None = None) -> Session:
    """What the functions of ``encast.tasks`` need of an open artifact; the model is not readied to run.

    ``batch_tokens`` is as in ``load``. Raises ``ArtifactError`` and ``InputError``.
    """
    graph, card = opened.graph, opened.card
    embedding = graph.outputs.get("embedding", graph.outputs.get("token_embedding"))
    splade, form = card.get("splade") or {}, card.get("token_form")
    if graph.meta.can("embed_tokens") and form is None:
        raise ArtifactError(f"{opened.path}: the card's token_form is missing; compile the checkpoint again")
    sparse = graph.outputs.get("sparse_embedding")
    weighs = sparse is not None and graph.type_of(sparse).shape[0] == "tokens"
    if weighs != (card.get("unweighted") is not None):
        raise ArtifactError(
            f"{opened.path}: the card's unweighted {'is missing' if weighs else 'belongs to no output'}; compile the "
            "checkpoint again"
        )
    return Session(
        graph.meta,
        tokenizer_of(opened),
        dim=graph.meta.hidden if embedding is None else int(graph.type_of(embedding).shape[1]),
        batch_tokens=BATCH_TOKENS if batch_tokens is None else batch_tokens,
        prompts=card.get("prompts") or {},
        default_prompt=card.get("default_prompt"),
        unit=any(node.op == "normalize" and embedding in node.outputs for node in graph.nodes),
        logarithms=SPLADE_ACTIVATIONS[splade.get("activation") or "relu"],
        max_active_dims=splade.get("max_active_dims"),
        unweighted=None if card.get("unweighted") is None else tuple(card["unweighted"]),
        token_form=None if form is None else TokenForm.from_json(form),
    )


def tokenizer_of(opened: Artifact) -> Tokenizer:
    """The tokenizer of an open artifact, cutting texts as its card says; raises ``ArtifactError``."""
    settings = opened.card.get("tokenizer") or {}
    return Tokenizer(
        opened.tokenizer_json,
        max_length=opened.max_length,
        truncation_side=settings.get("truncation_side"),
        mask_token=settings.get("mask_token"),
    )


def _states(batch: Batch, batch_tokens: int) -> Steps[list[F32]]:
    states: list[F32] = []
    for run in Runs("last_hidden_state", _parts(batch, batch_tokens)):
        states += np.split((yield run), run.piece.batch.cu_seqlens[1:-1])
    return states


def _parts(batch: Batch, batch_tokens: int) -> Iterator[Piece]:
    begin = 0
    while begin < batch.seqs:
        limit = int(batch.cu_seqlens[begin]) + batch_tokens
        end = max(begin + 1, int(np.searchsorted(batch.cu_seqlens, limit, "right")) - 1)
        yield Piece(begin, (), _slice(batch, begin, end))
        begin = end


def _slice(batch: Batch, begin: int, end: int) -> Batch:
    first, last = batch.cu_seqlens[begin], batch.cu_seqlens[end]
    types = None if batch.token_type_ids is None else batch.token_type_ids[first:last]
    return Batch(batch.token_ids[first:last], batch.cu_seqlens[begin : end + 1] - first, types)
