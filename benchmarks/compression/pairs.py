"""More pairs of texts for a task of pairs, without labels: each text of the training set with others that share words.

    python benchmarks/compression/pairs.py ../shared/data/glue/STS-B --out pairs.jsonl [--each 2]

A teacher's answers for such pairs teach a student more than the same training rows over and over. A text gets
``--each`` partners, drawn at random from the 12 nearest by cosine of tf-idf over words and pairs of words, so that some
mean nearly the same and most do not. Pairs of the training set are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer

from encast.data.datasets import open_dataset

NEAREST, BLOCK = 12, 1000


def recombined(pairs: list[tuple[str, str]], each: int, seed: int) -> Iterator[tuple[str, str]]:
    known = {frozenset(pair) for pair in pairs}
    texts = sorted({text for pair in pairs for text in pair})
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit_transform(texts)
    generator = random.Random(seed)
    for begin in range(0, len(texts), BLOCK):
        likeness = (vectors[begin : begin + BLOCK] @ vectors.T).toarray()
        for row, values in enumerate(likeness):
            values[begin + row] = -1.0
            for other in generator.sample(np.argsort(-values, kind="stable")[:NEAREST].tolist(), each):
                pair = texts[begin + row], texts[other]
                if frozenset(pair) not in known:
                    known.add(frozenset(pair))
                    yield pair


def write_pairs(data: Path, out: Path, each: int) -> int:
    """Writes JSONL; returns how many pairs."""
    rows = open_dataset(data, split="train").rows
    lines = [json.dumps({"text": a, "pair": b}) for a, b in recombined([row.text for row in rows], each, 0)]
    random.Random(0).shuffle(lines)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.out}: {write_pairs(options.data, options.out, options.each):,} pairs")


if __name__ == "__main__":
    main()
