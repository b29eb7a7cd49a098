"""What the Open Inference Protocol (KServe v2) means here, for REST and gRPC alike: tensors in, a task, tensors out.

Which tensors a model takes follows from its task, see ``_forms``: texts as ``BYTES``, or token ids that the client
padded at their ends. ``last_hidden_state`` comes when it is asked for. Every model has the one version "1".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.ir.meta import HEADS
from encast.serve.call import Call
from encast.serve.errors import RefusalError
from encast.serve.models import ServedModel
from encast.serve.service import RequestLimits, Service
from encast.tasks import answer, embed, embed_m3, embed_sparse, embed_tokens, fill_mask, rerank, tag
from encast.tasks.classify import decide, label_names, score_rows
from encast.tasks.embed_sparse import SparseVector
from encast.tasks.embed_tokens import TokenVectors
from encast.tasks.session import F32, Piece, Run, Session, Steps, need_finite
from encast.tasks.texts import check_texts_or_pairs
from encast.tasks.tokenize import OnLong, TooLongError

__all__ = ["VERSION", "InferRequest", "Spec", "Tensor", "find_model", "infer", "model_tensors"]

VERSION = "1"
"""Of every model."""

_DTYPES: dict[str, np.dtype[Any]] = {"INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"), "FP32": np.dtype("<f4")}
_LENGTH = struct.Struct("<I")
_MOST_NUMBERS = 1 << 26
"""Numbers of one output that is as long as its longest text, 256 MiB."""


def _invalid(message: str, field: str | None = None) -> RefusalError:
    return RefusalError("invalid", message, field=field)


@dataclass(frozen=True)
class Tensor:
    """``values``: a list of ``bytes`` in row-major order for the datatype BYTES, else an array of that shape.

    The makers raise ``RefusalError`` "invalid" for what does not fit together.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Any

    @staticmethod
    def of_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
        """Of bytes: little-endian numbers, or strings that follow their u32 lengths."""
        count = _count(name, shape)
        if datatype == "BYTES":
            return Tensor(name, datatype, tuple(shape), _strings(name, raw, count))
        dtype = _dtype(name, datatype)
        if len(raw) != count * dtype.itemsize:
            raise _invalid(
                f"{name[:100]!r} has {len(raw)} bytes; its shape {list(shape)} and datatype {datatype} ask for"
                f" {count * dtype.itemsize}",
                name,
            )
        return Tensor(name, datatype, tuple(shape), np.frombuffer(raw, dtype).reshape(shape))

    @staticmethod
    def of_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
        """Of a flat sequence: ``bytes`` or ``str`` for BYTES, ``int`` else."""
        count = _count(name, shape)
        if len(values) != count:
            raise _invalid(f"{name[:100]!r} has {len(values)} elements; its shape {list(shape)} asks for {count}", name)
        kinds = {*map(type, values)}
        if datatype == "BYTES":
            if not kinds <= {bytes, str}:
                raise _invalid(f"{name[:100]!r} is BYTES; its elements are to be strings", name)
            found = [one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in values]
            return Tensor(name, datatype, tuple(shape), found)
        dtype = _dtype(name, datatype)
        if not kinds <= {int}:
            raise _invalid(f"{name[:100]!r} is {datatype}; its elements are to be whole numbers", name)
        try:
            return Tensor(name, datatype, tuple(shape), np.array(values, dtype).reshape(shape))
        except OverflowError:
            raise _invalid(f"{name[:100]!r} holds a number that {datatype} has not", name) from None

    def raw(self) -> bytes:
        """The inverse of ``of_raw``."""
        if self.datatype == "BYTES":
            return b"".join(_LENGTH.pack(len(one)) + one for one in self.values)
        return bytes(self.values.tobytes())

    def texts(self) -> list[str]:
        """The elements of a BYTES tensor as UTF-8; raises ``RefusalError``."""
        texts = []
        for index, one in enumerate(self.values):
            try:
                texts.append(one.decode())
            except UnicodeDecodeError as error:
                raise _invalid(f"element {index} of {self.name!r} is no UTF-8: {error.reason}", self.name) from None
        return texts


def _count(name: str, shape: Sequence[int]) -> int:
    if not 1 <= len(shape) <= 4 or min(shape) < 1 or math.prod(shape) >= 1 << 31:
        raise _invalid(f"{name[:100]!r} has the shape {str(list(shape))[:100]}; give 1 or more for every axis", name)
    return math.prod(shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in ("INT32", "INT64"):
        raise _invalid(f"{name[:100]!r} has the datatype {datatype[:20]!r}; BYTES, INT64 and INT32 are taken", name)
    return _DTYPES[datatype]


def _strings(name: str, raw: bytes, count: int) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(raw) and len(found) < count:
        end = at + 4 + _LENGTH.unpack_from(raw, at)[0] if at + 4 <= len(raw) else len(raw) + 1
        if end > len(raw):
            raise _invalid(f"element {len(found)} of {name[:100]!r} says that it is longer than what was sent", name)
        found.append(raw[at + 4 : end])
        at = end
    if at != len(raw) or len(found) != count:
        raise _invalid(f"the strings of {name[:100]!r} are not the {count} that its shape asks for", name)
    return found


@dataclass(frozen=True)
class Spec:
    """A tensor that a model takes or gives; -1 in its shape is an axis of any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class InferRequest:
    """``outputs``: the names that are asked for; empty for those that come by default."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str]
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class _Options:
    on_long: OnLong
    prompt_name: str | None
    top_k: int
    max_active_dims: int | None
    kind: Any
    limits: RequestLimits


Values = dict[str, Any]
"""Name of an output to an array, or to a list of texts, or to lists of them."""


@dataclass(frozen=True)
class _Form:
    """One set of inputs that a model takes, and what it then gives: ``outputs``, and ``more`` when it is asked for."""

    inputs: tuple[Spec, ...]
    optional: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    more: tuple[Spec, ...]
    steps: Callable[[Session, Mapping[str, Tensor], frozenset[str], _Options], Steps[Values]]


def _forms(session: Session) -> list[_Form]:
    meta, task = session.meta, session.meta.task
    states = (Spec("last_hidden_state", "FP32", (-1, -1, meta.hidden)), Spec("attention_mask", "INT64", (-1, -1)))
    labels = len(meta.labels) if meta.labels else -1
    text = Spec("text", "BYTES", (-1,))
    ids = tuple(Spec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask", "token_type_ids"))
    classes = (
        Spec("logits", "FP32", (-1, labels)),
        Spec("scores", "FP32", (-1, labels)),
        Spec("label", "BYTES", (-1,)),
    )
    vector = (Spec("embedding", "FP32", (-1, session.dim)),)
    heads: tuple[Spec, ...] = ()
    relevance = (Spec("relevance_score", "FP32", (-1,)),)
    ranked = _Form((Spec("query", "BYTES", (1,)), Spec("documents", "BYTES", (-1,))), (), relevance, (), _rerank)

    def places(*more: tuple[str, str, tuple[int, ...]]) -> tuple[Spec, ...]:
        return tuple(Spec(*one) for one in more)

    span = ("start", "INT64", (-1,)), ("end", "INT64", (-1,)), ("score", "FP32", (-1,))
    if task == "embed":
        forms = [_Form((text,), (), vector, states, _embed), ranked]
        heads = vector
    elif task == "embed_sparse":
        weights = places(("row", "INT64", (-1,)), ("index", "INT64", (-1,)), ("value", "FP32", (-1,)))
        forms = [_Form((text,), (), weights, (), _embed_sparse)]
    elif task == "embed_tokens":
        vectors = places(("row", "INT64", (-1,)), ("token_id", "INT64", (-1,)), ("vector", "FP32", (-1, session.dim)))
        forms = [_Form((text,), (), vectors, (), _embed_tokens), ranked]
        heads = places(("token_embedding", "FP32", (-1, -1, session.dim)))
    elif task == "embed_m3":
        three = places(
            ("sparse_row", "INT64", (-1,)), ("index", "INT64", (-1,)), ("value", "FP32", (-1,)),
            ("token_row", "INT64", (-1,)), ("token_id", "INT64", (-1,)), ("vector", "FP32", (-1, -1)),
        )  # fmt: skip
        forms = [_Form((text,), (), (*vector, *three), (), _embed_m3), ranked]
        heads = places(("m3_embedding", "FP32", (-1, -1, -1)))
    elif task == "classify":
        forms = [_Form((text,), (), classes, (), _classify)]
        forms += [ranked] if labels == 1 else []
        heads = classes
    elif task == "answer":
        asked = places(("question", "BYTES", (-1,)), ("context", "BYTES", (-1,)))
        forms = [_Form(asked, (), places(("answer", "BYTES", (-1,)), *span), (), _answer)]
        heads = places(("logits", "FP32", (-1, -1, 2)))
    elif task == "tag":
        entities = places(("row", "INT64", (-1,)), ("entity", "BYTES", (-1,)), ("label", "BYTES", (-1,)), *span)
        forms = [_Form((text,), (), entities, (), _tag)]
        heads = places(("logits", "FP32", (-1, -1, labels)))
    elif task == "fill_mask":
        tokens = places(
            ("row", "INT64", (-1,)),
            ("token", "BYTES", (-1, -1)),
            ("token_id", "INT64", (-1, -1)),
            ("score", "FP32", (-1, -1)),
        )
        forms = [_Form((text,), (), tokens, (), _fill_mask)]
    else:
        forms = [_Form((text,), (), states, (), _embed)]
    more = states[:1] if heads else ()
    return [*forms, _Form(ids[:1], ids[1:], heads or states[:1], more, _of_ids)]


def model_tensors(model: ServedModel) -> tuple[list[Spec], list[Spec]]:
    """All inputs and all outputs of a model."""
    forms = _forms(model.session)
    inputs = {spec.name: spec for form in forms for spec in (*form.inputs, *form.optional)}
    outputs = {spec.name: spec for form in forms for spec in (*form.outputs, *form.more)}
    return list(inputs.values()), list(outputs.values())


def find_model(service: Service, name: str, version: str) -> ServedModel:
    """The model of that name; ``version`` may be empty. Raises ``RefusalError``."""
    model = service.models.find(name)
    if version not in ("", VERSION):
        raise RefusalError("not_found", f"{model.name!r} has no version {version[:20]!r}; it has {VERSION}")
    return model


async def infer(service: Service, call: Call, request: InferRequest) -> tuple[ServedModel, list[Tensor]]:
    """The outputs that a request asks for, in its order. Raises ``RefusalError``."""
    model = find_model(service, request.model, request.version)
    given = {tensor.name: tensor for tensor in request.inputs}
    if len(given) != len(request.inputs):
        raise _invalid("two inputs have the same name", "inputs")
    form = _form_of(model, given)
    known = {spec.name: spec for spec in (*form.outputs, *form.more)}
    wanted = list(request.outputs) or [spec.name for spec in form.outputs]
    for name in wanted:
        if name not in known:
            raise _invalid(
                f"{model.name!r} has no output {name[:100]!r} for these inputs; it has {list(known)}", "outputs"
            )
    for tensor in request.inputs:
        # A pair counts as two texts.
        service.limits.check_count(len(tensor.values) if tensor.datatype == "BYTES" else tensor.shape[0], tensor.name)
        if tensor.datatype == "BYTES":
            service.limits.check_texts(tensor.texts(), tensor.name)
    steps = form.steps(model.session, given, frozenset(wanted), _options(request.parameters, service.limits))
    try:
        return model, await call.run(model, _tensors(steps, [known[name] for name in wanted]))
    except RefusalError as refusal:
        long = refusal.__cause__
        if not isinstance(long, TooLongError):
            raise
        raise RefusalError(
            "unprocessable",
            f"text {long.index} has more than {long.most} tokens, the most that {model.name!r} reads; shorten it, or"
            " send the parameter truncate: true",
        ) from None


def _form_of(model: ServedModel, given: Mapping[str, Tensor]) -> _Form:
    forms = _forms(model.session)
    for form in forms:
        needed = {spec.name: spec for spec in form.inputs}
        taken = needed | {spec.name: spec for spec in form.optional}
        if needed.keys() <= given.keys() <= taken.keys():
            for name, tensor in given.items():
                texts = taken[name].datatype == "BYTES"
                if texts != (tensor.datatype == "BYTES"):
                    kinds = "BYTES" if texts else "INT64 or INT32"
                    raise _invalid(f"{name!r} has the datatype {tensor.datatype}; {kinds} is needed", name)
            return form
    taken_names = " or ".join(str([spec.name for spec in form.inputs]) for form in forms)
    names = str([name[:40] for name in given])[:200]
    raise _invalid(f"{model.name!r} takes the inputs {taken_names}; this request has {names}", "inputs")


def _options(parameters: Mapping[str, Any], limits: RequestLimits) -> _Options:
    kinds = {"truncate": bool, "prompt_name": str, "top_k": int, "max_active_dims": int, "kind": str}
    for name, value in parameters.items():
        if name not in kinds:
            raise _invalid(f"there is no parameter {name[:100]!r}; there are {list(kinds)}", "parameters")
        if type(value) is not kinds[name]:
            raise _invalid(f"the parameter {name} is of type {type(value).__name__}; {kinds[name].__name__} is needed")
    top_k = parameters.get("top_k", 5)
    if not 1 <= top_k <= 1000:
        raise _invalid(f"the parameter top_k is {top_k}; give 1 to 1000", "parameters")
    on_long: OnLong = "truncate" if parameters.get("truncate") else "error"
    kind = parameters.get("kind", "document")
    if kind not in ("query", "document"):
        raise _invalid(f"the parameter kind is {kind[:20]!r}; query and document are known", "parameters")
    return _Options(on_long, parameters.get("prompt_name"), top_k, parameters.get("max_active_dims"), kind, limits)


def _tensors(steps: Steps[Values], specs: Sequence[Spec]) -> Steps[list[Tensor]]:
    values = yield from steps
    return [_tensor(spec, values[spec.name]) for spec in specs]


def _tensor(spec: Spec, value: Any) -> Tensor:
    if spec.datatype == "BYTES":
        flat, shape = value, [len(value)]
        while len(shape) < len(spec.shape):
            shape.append(len(flat[0]) if flat else 0)
            flat = list(chain.from_iterable(flat))
        return Tensor(spec.name, "BYTES", tuple(shape), [text.encode() for text in flat])
    array = np.ascontiguousarray(value, _DTYPES[spec.datatype])
    if spec.datatype == "FP32":
        need_finite(array)
    if array.size == 0:
        array = array.reshape((0,) * len(spec.shape))
    return Tensor(spec.name, spec.datatype, array.shape, array)


def _texts(tensor: Tensor) -> list[str]:
    if len(tensor.shape) > 2 or tensor.shape[1:] not in ((), (1,)):
        raise _invalid(f"{tensor.name!r} has the shape {list(tensor.shape)}; [n] or [n, 1] is needed", tensor.name)
    return tensor.texts()


def _embed(session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options) -> Steps[Values]:
    texts = _texts(given["text"])
    values: Values = {}
    if "embedding" in wanted:
        values["embedding"] = yield from embed(session, texts, on_long=options.on_long, prompt_name=options.prompt_name)
    if wanted - {"embedding"}:
        prompt = session.prompt(options.prompt_name)
        pieces = list(session.stream([prompt + text for text in texts], on_long=options.on_long))
        lengths = np.concatenate([np.diff(piece.batch.cu_seqlens) for piece in pieces])
        mask = np.arange(lengths.max()) < lengths[:, None]
        values["attention_mask"] = mask
        if "last_hidden_state" in wanted:
            values["last_hidden_state"] = yield from _padded(pieces, "last_hidden_state", mask, session.meta.hidden)
    return values


def _classify(
    session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options
) -> Steps[Values]:
    tensor = given["text"]
    if len(tensor.shape) == 2 and tensor.shape[1] == 2:
        texts = tensor.texts()
        rows: list[Any] = list(zip(texts[::2], texts[1::2], strict=True))
    else:
        rows = list(_texts(tensor))
    logits = yield from score_rows(session, check_texts_or_pairs(rows, "text"), on_long=options.on_long)
    return _classes(session, logits)


def _classes(session: Session, logits: F32) -> Values:
    names = label_names(session.meta, logits.shape[1])
    found = [decide(session.meta, row, names) for row in logits.astype(np.float64)]
    # A regression has no best label; its label has a name all the same.
    labels = [names[0] if one.label is None else one.label for one in found]
    return {"logits": logits, "scores": [list(one.scores.values()) for one in found], "label": labels}


def _embed_sparse(
    session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options
) -> Steps[Values]:
    found = yield from embed_sparse(
        session, _texts(given["text"]), on_long=options.on_long, prompt_name=options.prompt_name,
        max_active_dims=options.max_active_dims, most_weights=options.limits.max_weights,
    )  # fmt: skip
    return _sparse_values(found)


def _sparse_values(found: Sequence[SparseVector]) -> Values:
    rows = np.repeat(np.arange(len(found)), [one.indices.size for one in found])
    index, value = (
        np.concatenate([np.empty(0, kind), *(getattr(one, name) for one in found)])
        for name, kind in (("indices", np.int64), ("values", np.float32))
    )
    return {"row": rows, "index": index, "value": value}


def _embed_tokens(
    session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options
) -> Steps[Values]:
    found = yield from embed_tokens(
        session, _texts(given["text"]), kind=options.kind, on_long=options.on_long, prompt_name=options.prompt_name
    )  # fmt: skip
    return _token_values(found, session.dim)


def _token_values(found: Sequence[TokenVectors], dim: int) -> Values:
    rows = np.repeat(np.arange(len(found)), [len(one.token_ids) for one in found])
    ids = np.concatenate([np.empty(0, np.int64), *(one.token_ids for one in found)])
    vectors = np.concatenate([one.vectors for one in found]) if found else np.empty((0, dim), np.float32)
    return {"row": rows, "token_id": ids, "vector": vectors}


def _embed_m3(
    session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options
) -> Steps[Values]:
    found = yield from embed_m3(
        session, _texts(given["text"]), on_long=options.on_long, prompt_name=options.prompt_name,
        max_active_dims=options.max_active_dims, most_weights=options.limits.max_weights,
    )  # fmt: skip
    sparse = _sparse_values([one.sparse for one in found])
    tokens = _token_values([one.tokens for one in found], session.dim)
    embedding = np.stack([one.embedding for one in found]) if found else np.empty((0, session.dim), np.float32)
    return {
        "embedding": embedding, "sparse_row": sparse.pop("row"), **sparse, "token_row": tokens.pop("row"), **tokens
    }  # fmt: skip


def _rerank(session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options) -> Steps[Values]:
    query = _texts(given["query"])
    if len(query) != 1:
        raise _invalid(f"'query' has {len(query)} texts; give one", "query")
    most, documents = options.limits.max_products, _texts(given["documents"])
    found = yield from rerank(session, query[0], documents, on_long=options.on_long, most_products=most)
    return {"relevance_score": [score for _, score in sorted(found)]}


def _answer(session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options) -> Steps[Values]:
    found: Any = yield from answer(session, _texts(given["question"]), _texts(given["context"]))
    columns = {"answer": "text", "start": "start", "end": "end", "score": "score"}
    return {name: [getattr(one, field) for one in found] for name, field in columns.items()}


def _tag(session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options) -> Steps[Values]:
    found = yield from tag(session, _texts(given["text"]), on_long=options.on_long)
    rows = [(row, one) for row, tagging in enumerate(found) for one in tagging.entities]
    columns = {"entity": "text", "label": "label", "start": "start", "end": "end", "score": "score"}
    values: Values = {name: [getattr(one, field) for _, one in rows] for name, field in columns.items()}
    return values | {"row": [row for row, _ in rows]}


def _fill_mask(
    session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options
) -> Steps[Values]:
    found = yield from fill_mask(session, _texts(given["text"]), top_k=options.top_k, on_long=options.on_long)
    rows = [(row, mask) for row, masks in enumerate(found) for mask in masks]
    columns = {"token": "token", "token_id": "token_id", "score": "score"}
    values: Values = {
        name: [[getattr(one, field) for one in mask] for _, mask in rows] for name, field in columns.items()
    }
    return values | {"row": [row for row, _ in rows]}


def _of_ids(session: Session, given: Mapping[str, Tensor], wanted: frozenset[str], options: _Options) -> Steps[Values]:
    pieces, mask = _pieces(session, given)
    values: Values = {}
    head = HEADS[session.meta.task]
    if head is not None and wanted - {"last_hidden_state"}:
        output, rows = head
        if rows == "seqs":
            found = yield from _collect(pieces, output)
            values |= _classes(session, found) if output == "logits" else {output: found}
        else:
            values[output] = yield from _padded(pieces, output, mask)
    if "last_hidden_state" in wanted:
        values["last_hidden_state"] = yield from _padded(pieces, "last_hidden_state", mask, session.meta.hidden)
    return values


def _pieces(session: Session, given: Mapping[str, Tensor]) -> tuple[list[Piece], Any]:
    """The rows of ids without their padding, and which are none: ``bool[n, len]``."""
    ids = given["input_ids"].values
    for name, tensor in given.items():
        if len(tensor.shape) != 2 or tensor.shape != ids.shape:
            raise _invalid(
                f"{name!r} has the shape {list(tensor.shape)}; [n, len], that of 'input_ids', is needed", name
            )
    mask = given["attention_mask"].values if "attention_mask" in given else np.ones(ids.shape, np.int64)
    lengths = (mask != 0).sum(axis=1)
    real = np.arange(ids.shape[1]) < lengths[:, None]
    wrong = np.flatnonzero((mask != real).any(axis=1) | (lengths == 0))
    if wrong.size:
        raise _invalid(
            f"row {wrong[0]} of 'attention_mask' is not ones and then zeros, one or more ones", "attention_mask"
        )
    meta = session.meta
    if lengths.max() > meta.max_len:
        raise InputError(
            f"row {lengths.argmax()} of 'input_ids' has {lengths.max()} tokens; the model reads {meta.max_len}"
        )
    types = given["token_type_ids"].values if "token_type_ids" in given else None
    for name, array, size in (("input_ids", ids, meta.vocab), ("token_type_ids", types, max(meta.type_vocab, 1))):
        if array is not None and (bad := array[real & ((array < 0) | (array >= size))]).size:
            raise InputError(f"{name!r} holds {bad[0]}; the model takes 0 to {size - 1}")

    def rows(array: Any) -> list[list[int]]:
        return [row[:length].tolist() for row, length in zip(array, lengths, strict=True)]

    typed = None if types is None or meta.type_vocab <= 1 else rows(types)
    return list(session.id_pieces(rows(ids), typed)), real


def _collect(pieces: Iterable[Piece], output: str) -> Steps[F32]:
    found: list[F32] = []
    for piece in pieces:
        found += [(yield Run(output, piece))]
    return np.concatenate(found)


def _padded(pieces: list[Piece], output: str, mask: Any, columns: int = 1) -> Steps[F32]:
    """``f32[n, len, columns]``, zero where ``mask: bool[n, len]`` is; ``columns``: so many at least."""
    if mask.size * columns > _MOST_NUMBERS:
        raise RefusalError("too_large", f"{output} of {mask.shape[0]} rows is too large; send fewer, or shorter ones")
    rows = yield from _collect(pieces, output)
    padded = np.zeros((*mask.shape, rows.shape[1]), np.float32)
    padded[mask] = rows
    return padded
