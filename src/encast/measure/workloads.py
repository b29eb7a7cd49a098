"""What is run: grids of batch and length, lengths by a histogram, and real texts.

Real lengths come in batches that are sorted by length, for all systems alike: a peer that pads then computes the
least padding that a good engineer would let it compute, and packed batches lose nothing by it. Grids of one length have
masks of ones, because nothing is padded in them; ``shortest`` below 1, a histogram or texts give masks as services see
them.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch, Int32
from encast.data.datasets import open_dataset
from encast.errors import InputError
from encast.measure.batches import pick
from encast.measure.fields import positive, seed_number, whole_number, whole_numbers
from encast.measure.input_spec import InputSpec, read_input_spec
from encast.measure.lengths import read_histogram
from encast.measure.texts import read_texts
from encast.tasks.texts import Text

__all__ = [
    "KINDS",
    "Drawn",
    "Fixed",
    "Several",
    "Workload",
    "describe",
    "has_texts",
    "make_workload",
    "padding",
    "random_ids",
    "real_texts",
]

Label = Mapping[str, int | float | str]

ID_SETS = 4
"""Batches of different ids that a shape is timed with: an answer that is kept instead of computed shows."""

_MOST_TOKENS = 1 << 24


class Workload(ABC):
    """Sequences of one kind. ``label`` are the columns that say what a plain draw is."""

    name: str
    label: Label

    def parts(self) -> Sequence[Workload]:
        """The workloads of one batch size and one kind of sequences that it consists of; itself when it is one."""
        return (self,)

    @abstractmethod
    def draw(
        self, sets: int = ID_SETS, *, batch: int | None = None, length: int | None = None, seed: int = 0
    ) -> tuple[Batch, ...]:
        """``sets`` batches of one shape (the same lengths in the same order) with different ids.

        ``batch`` (sequences) and ``length`` (tokens of each) replace the workload's own. Another ``seed`` gives
        other ids of the same shape; the same arguments always give the same ids. Raises ``InputError``.
        """

    @abstractmethod
    def replay(self, *, batch: int | None = None, tokens: int | None = None) -> tuple[Batch, ...]:
        """Every sequence once, neighbours in length together, in batches of ``batch`` sequences or, when ``tokens`` is
        given, of as many as have at most so many tokens after padding; the batches in random order."""

    @abstractmethod
    def arrivals(self, count: int) -> tuple[Batch, ...]:
        """``count`` requests of one sequence each, in the order in which they come."""


class Fixed(Workload):
    """Random ids: ``batch`` sequences of ``length`` tokens, or of ``shortest * length`` to ``length`` tokens."""

    def __init__(
        self, name: str, inputs: InputSpec, batch: int, length: int, shortest: float = 1.0, seed: int = 0
    ) -> None:
        self.name = name
        self.label = {"batch": batch, "length": length}
        self._inputs, self._batch, self._length, self._shortest, self._seed = inputs, batch, length, shortest, seed
        inputs.check(f"workload.length={length}", [length])

    def draw(
        self, sets: int = ID_SETS, *, batch: int | None = None, length: int | None = None, seed: int = 0
    ) -> tuple[Batch, ...]:
        batch, length = batch or self._batch, length or self._length
        self._inputs.check(f"length {length}", [length])
        if batch * length > _MOST_TOKENS:
            raise InputError(f"{batch} x {length} tokens are more than {_MOST_TOKENS} in a batch; give less")
        lengths = self._lengths(batch, length)
        return tuple(
            _random_batch(np.random.default_rng((self._seed, seed, number, batch, length)), lengths, self._inputs.vocab)
            for number in range(sets)
        )

    def _lengths(self, batch: int, length: int) -> Int32:
        lengths = np.full(batch, length, np.int32)
        if self._shortest < 1:
            # One sequence keeps the full length: it is what the row is named after, and what padding goes up to.
            low = max(1, int(np.ceil(self._shortest * length)))
            lengths[:-1] = np.sort(np.random.default_rng(self._seed).integers(low, length + 1, batch - 1))
        return lengths

    def replay(self, *, batch: int | None = None, tokens: int | None = None) -> tuple[Batch, ...]:
        return self.draw(batch=max(1, tokens // self._length) if tokens else batch)

    def arrivals(self, count: int) -> tuple[Batch, ...]:
        (whole,) = self.draw(1, batch=max(count, 2), seed=1)
        order = np.random.default_rng(self._seed).permutation(whole.seqs)  # they are sorted by length
        return tuple(pick(whole, [int(index)]) for index in order[:count])


class Drawn(Workload):
    """Sequences of real lengths: ``pool`` holds them in the order of the file."""

    def __init__(self, name: str, inputs: InputSpec, batch: int, pool: Batch, seed: int = 0) -> None:
        if not pool.seqs:
            raise InputError(f"{name}: holds no sequence; give a file with at least one row")
        self.name = name
        self.label = {"batch": batch, "lengths": name}
        self.pool = pool
        self._inputs, self._batch, self._seed = inputs, batch, seed
        self._by_length = np.argsort(self.lengths, kind="stable")

    @property
    def lengths(self) -> Int32:
        """``i32[n]``: tokens of every sequence of the pool."""
        return np.diff(self.pool.cu_seqlens)

    def draw(
        self, sets: int = ID_SETS, *, batch: int | None = None, length: int | None = None, seed: int = 0
    ) -> tuple[Batch, ...]:
        """As ``Workload.draw``. The lengths are quantiles of the pool's, in the middle of ``batch`` equal shares of it.

        So one batch stands for the whole distribution; ``replay`` runs all of it. The first set of seed 0 is texts as
        they are, the others have the same tokens within each text in another order.
        """
        batch = batch or self._batch
        if length is not None:
            return Fixed(self.name, self._inputs, batch, length, seed=self._seed).draw(sets, seed=seed)
        count = self.pool.seqs
        shares = [int(self._by_length[int((index + 0.5) * count / batch) % count]) for index in range(batch)]
        texts = pick(self.pool, shares)
        return tuple(
            texts if number == seed == 0 else _rearranged(texts, np.random.default_rng((self._seed, seed, number)))
            for number in range(sets)
        )

    def replay(self, *, batch: int | None = None, tokens: int | None = None) -> tuple[Batch, ...]:
        size = batch or self._batch
        lengths = self.lengths
        groups: list[list[int]] = [[]]
        for index in map(int, self._by_length):
            # Sorted by length: the next sequence is the longest of its batch, which is what all would be padded to.
            full = len(groups[-1]) >= size if tokens is None else (len(groups[-1]) + 1) * int(lengths[index]) > tokens
            if groups[-1] and full:
                groups.append([])
            groups[-1].append(index)
        order = np.random.default_rng((self._seed, len(groups))).permutation(len(groups))
        return tuple(pick(self.pool, groups[index]) for index in order)

    def arrivals(self, count: int) -> tuple[Batch, ...]:
        singles = [pick(self.pool, [index]) for index in range(min(count, self.pool.seqs))]
        return tuple(itertools.islice(itertools.cycle(singles), count))


class Several(Workload):
    """More than one batch size or length: a grid. Scenarios measure its parts one after the other."""

    def __init__(self, name: str, parts: Sequence[Workload]) -> None:
        self.name, self._parts = name, tuple(parts)
        self.label = {"shapes": len(self._parts)}

    def parts(self) -> Sequence[Workload]:
        return self._parts

    def draw(
        self, sets: int = ID_SETS, *, batch: int | None = None, length: int | None = None, seed: int = 0
    ) -> tuple[Batch, ...]:
        raise self._one()

    def replay(self, *, batch: int | None = None, tokens: int | None = None) -> tuple[Batch, ...]:
        raise self._one()

    def arrivals(self, count: int) -> tuple[Batch, ...]:
        raise self._one()

    def _one(self) -> InputError:
        return InputError(
            f"workload {self.name} has {len(self._parts)} shapes, and one is needed here: choose it with "
            "workload.batch=N and workload.length=N"
        )


def describe(name: str, batches: Sequence[Batch]) -> dict[str, Any]:
    """The fields ``workload`` of a row: sequences and tokens of all batches, and [least, median, most] length."""
    lengths = np.concatenate([np.diff(batch.cu_seqlens) for batch in batches])
    return {
        "name": name,
        "sequences": int(lengths.size),
        "tokens": int(lengths.sum()),
        "lengths": [int(lengths.min()), float(np.median(lengths)), int(lengths.max())],
    }


def padding(batches: Sequence[Batch]) -> float:
    """The share of what a padding runtime computes that is padding: 0 for batches of equal lengths."""
    tokens = sum(batch.tokens for batch in batches)
    return 1 - tokens / sum(batch.seqs * int(np.diff(batch.cu_seqlens).max()) for batch in batches)


def random_ids(rng: np.random.Generator, count: int, vocab: int) -> Int32:
    """Ids ``i32[count]`` of ordinary tokens.

    Special tokens stand first in every vocabulary of the family and the mask last in some. None is drawn: RoBERTa
    takes the positions from where padding tokens stand.
    """
    return rng.integers(min(1000, vocab // 2), max(vocab - 1, 1), count, np.int32)


def _random_batch(rng: np.random.Generator, lengths: Any, vocab: int) -> Batch:
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return Batch(random_ids(rng, int(cu_seqlens[-1]), vocab), cu_seqlens)


def _rearranged(batch: Batch, rng: np.random.Generator) -> Batch:
    """The same tokens, within each sequence in another order, its first and last one (special ones) in their places."""
    ids = batch.token_ids.copy()
    for begin, end in itertools.pairwise(batch.cu_seqlens):
        rng.shuffle(ids[begin + 1 : end - 1])
    return Batch(ids, batch.cu_seqlens, batch.token_type_ids)


def make_workload(config: Mapping[str, Any], model: Path | InputSpec) -> Workload:
    """The workload that a configuration describes: ``kind`` and that kind's fields, see ``conf/workload``.

    ``model``: the folder of the checkpoint whose vocabulary, longest sequence and tokenizer count, or these themselves.
    Raises ``InputError`` for kinds and fields that there are not, listing those that there are, for files that cannot
    be read, naming file and line, and for lengths that the model does not take.
    """
    kind = str(config.get("kind"))
    if kind not in KINDS:
        raise InputError(f"workload.kind is {kind!r}; {', '.join(KINDS)} are known")
    known = {"name", "kind", "batch", "seed", *_FIELDS[kind]}
    unknown = sorted(set(map(str, config)) - known)
    if unknown:
        raise InputError(f"workload.{unknown[0]} is no field of a workload of kind {kind}; it has {sorted(known)}")
    inputs = model if isinstance(model, InputSpec) else read_input_spec(model)
    batch = whole_numbers("workload.batch", config.get("batch", 1))
    parts = KINDS[kind](config, inputs, batch, seed_number("workload.seed", config.get("seed")))
    return parts[0] if len(parts) == 1 else Several(parts[0].name, parts)


def _grid(config: Mapping[str, Any], inputs: InputSpec, batch: tuple[int, ...], seed: int) -> Sequence[Workload]:
    name = str(config.get("name") or "grid")
    lengths = whole_numbers("workload.length", config.get("length", 128))
    shortest = positive("workload.shortest", config.get("shortest", 1.0), most=1)
    return [Fixed(name, inputs, size, length, shortest, seed) for size in batch for length in lengths]


def _histogram(config: Mapping[str, Any], inputs: InputSpec, batch: tuple[int, ...], seed: int) -> Sequence[Workload]:
    file = _file(config, "LENGTH:COUNT,... or a JSON, CSV or TSV file")
    name = str(config.get("name") or Path(file).name)
    lengths = read_histogram(file)
    inputs.check(file, lengths)
    lengths = lengths[: _sequences(config) or len(lengths)]  # in random order already
    pool = _random_batch(np.random.default_rng((seed, 1)), lengths, inputs.vocab)
    return [Drawn(name, inputs, size, pool, seed) for size in batch]


def _texts(config: Mapping[str, Any], inputs: InputSpec, batch: tuple[int, ...], seed: int) -> Sequence[Workload]:
    file = _file(config, "a file of texts, JSONL, CSV or Parquet")
    columns = [str(config.get("column") or "text")]
    if config.get("pair_column"):
        columns.append(str(config["pair_column"]))
    rows = read_texts(file, columns, str(config.get("format") or "auto"))
    return _tokenised(str(config.get("name") or Path(file).name), file, rows, config, inputs, batch, seed)


def _dataset(config: Mapping[str, Any], inputs: InputSpec, batch: tuple[int, ...], seed: int) -> Sequence[Workload]:
    which = str(config.get("set"))
    data = Path(str(_given(config, "data", "the folder with squad-v1.1/, queries/ or glue/")))
    rows = real_texts(which, data)
    return _tokenised(str(config.get("name") or which), f"{data}: {which}", rows, config, inputs, batch, seed)


_FIELDS = {
    "grid": ("length", "shortest"),
    "histogram": ("file", "sequences"),
    "texts": ("file", "column", "pair_column", "format", "sequences"),
    "dataset": ("set", "data", "sequences"),
}
KINDS: dict[str, Callable[[Mapping[str, Any], InputSpec, tuple[int, ...], int], Sequence[Workload]]] = {
    "grid": _grid,
    "histogram": _histogram,
    "texts": _texts,
    "dataset": _dataset,
}


@dataclass(frozen=True)
class _Set:
    """One public data set: where it lies below the data folder, and its texts."""

    pattern: str
    read: Callable[[Path], list[Text]]


@functools.lru_cache(maxsize=1)
def _rows(path: Path) -> Sequence[Any]:
    """Kept, because models and workloads ask for several columns of one file, and reading it takes seconds."""
    return open_dataset(path).rows


def _column(texts: Callable[[Any], Text]) -> Callable[[Path], list[Text]]:
    return lambda path: list(dict.fromkeys(texts(row) for row in _rows(path)))


_SETS = {
    "squad-questions": _Set("squad-v1.1/dev-v1.1*.json*", _column(lambda row: row.question)),
    "squad-paragraphs": _Set("squad-v1.1/dev-v1.1*.json*", _column(lambda row: row.context)),
    "squad-pairs": _Set("squad-v1.1/dev-v1.1*.json*", _column(lambda row: (row.question, row.context))),
    "squad-train-questions": _Set("squad-v1.1/train-v1.1*.json*", _column(lambda row: row.question)),
    "squad-train-paragraphs": _Set("squad-v1.1/train-v1.1*.json*", _column(lambda row: row.context)),
    "mrpc-pairs": _Set("glue/MRPC/dev.tsv*", _column(lambda row: row.text)),
    "nq-queries": _Set("queries/NQ-open.dev.jsonl*", lambda path: read_texts(str(path), ["question"])),
}


def real_texts(which: str, data: Path) -> list[Text]:
    """The distinct texts of a public data set, in its order; raises ``InputError`` when the folder lacks it."""
    if which not in _SETS:
        raise InputError(f"workload.set is {which!r}; {', '.join(_SETS)} are known")
    file = _file_of(which, data)
    if file is None:
        raise InputError(f"{data / _SETS[which].pattern}: no such file; name the folder that holds it with data=FOLDER")
    return _SETS[which].read(file)


def has_texts(which: str, data: Path) -> bool:
    """Whether the folder has the public data set of that name."""
    return _file_of(which, data) is not None


def _file_of(which: str, data: Path) -> Path | None:
    return next(iter(sorted(data.glob(_SETS[which].pattern))), None)


def _tokenised(
    name: str,
    source: str,
    rows: Sequence[Text],
    config: Mapping[str, Any],
    inputs: InputSpec,
    batch: tuple[int, ...],
    seed: int,
) -> Sequence[Workload]:
    """A sample of so many rows as were asked for, in their order, by the model's tokenizer."""
    if not rows:
        raise InputError(f"{source}: holds no text; give a file with at least one row")
    most = _sequences(config)
    if most is not None and most < len(rows):
        kept = np.sort(np.random.default_rng((seed, 2)).choice(len(rows), most, replace=False))
        rows = [rows[index] for index in kept]
    encodings = inputs.tokenizer().encode(rows)
    ids = [encoding.ids for encoding in encodings]
    typed = inputs.type_vocab > 1 and any(isinstance(row, tuple) for row in rows)
    pool = Batch.of(ids, [encoding.type_ids for encoding in encodings] if typed else None)
    return [Drawn(name, inputs, size, pool, seed) for size in batch]


def _given(config: Mapping[str, Any], field: str, what: str) -> Any:
    value = config.get(field)
    if value is None:
        raise InputError(f"workload={config.get('name') or config['kind']} needs {what}: give workload.{field}=...")
    return value


def _file(config: Mapping[str, Any], what: str) -> str:
    return str(_given(config, "file", what))


def _sequences(config: Mapping[str, Any]) -> int | None:
    value = config.get("sequences")
    return None if value is None else whole_number("workload.sequences", value)
