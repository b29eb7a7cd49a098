"""Batch invariance: the bits of an answer depend on its text alone."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import DTYPES, open_cpu, same_bits
from families import FAMILIES

from encast.backends.cpu import CpuRunnable
from encast.batch import Batch

CASES = (
    "bert-features", "mpnet-features", "albert-odd", "roberta-fill_mask", "bert-embed", "bert-embed_sparse",
    "modernbert-features", "nomic_bert-features", "new-features",
    "jina_bert-features", "deberta-v2-features", "deberta-v2-conv",
    "bert-relative_key_query", "bert-relative-two-tasks",
    *(f"{arch}-{kind}" for arch in FAMILIES for kind in ("features", "wide")),
)  # fmt: skip
LENGTHS = (1, 2, 31, 48, 7, 16, 17, 40, 33, 1, 48, 25, 12)


def _texts(cpu: CpuRunnable, vocab: int, longest: int, types: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(11)
    return [
        (
            rng.integers(0, vocab, min(length, longest)).astype(np.int32),
            rng.integers(0, max(types, 1), min(length, longest)).astype(np.int32),
        )
        for length in LENGTHS
    ]


def _run(cpu: CpuRunnable, texts: list[tuple[np.ndarray, np.ndarray]], output: str) -> list[np.ndarray]:
    lengths = [len(ids) for ids, _ in texts]
    batch = Batch(
        np.concatenate([ids for ids, _ in texts]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.concatenate([types for _, types in texts]),
    )
    if output in ("embedding", "sparse_embedding"):
        return list(cpu.run(output, batch))
    select = np.arange(batch.tokens, dtype=np.int32) if output == "logits" else None
    return np.split(cpu.run(output, batch, select), batch.cu_seqlens[1:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_bits_depend_on_the_text_alone(
    name: str, dtype: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cases import open_case

    meta = open_case(name, tmp_path_factory).graph.meta
    output = {"bert-embed": "embedding", "bert-embed_sparse": "sparse_embedding", "roberta-fill_mask": "logits"}.get(
        name, "last_hidden_state"
    )
    one = open_cpu(name, dtype, tmp_path_factory, threads=1)
    texts = _texts(one, meta.vocab, meta.max_len, meta.type_vocab)
    alone = [_run(one, [text], output)[0] for text in texts]
    assert all(np.isfinite(rows).all() for rows in alone)

    two = open_cpu(name, dtype, tmp_path_factory, threads=2)
    assert all(same_bits(_run(two, [text], output)[0], rows) for text, rows in zip(texts, alone, strict=True))

    # The smallest chunk that holds the longest text: nearly every text crosses a boundary somewhere.
    monkeypatch.setenv("ENCAST_CHUNK_TOKENS", "1")
    small_chunks = open_cpu(name, dtype, tmp_path_factory, threads=2)
    monkeypatch.delenv("ENCAST_CHUNK_TOKENS")
    # Threads alone with small blocks of rows, the last of which are halved, and threads that share every product.
    monkeypatch.setenv("ENCAST_BLOCK_ROWS", "32")
    monkeypatch.setenv("ENCAST_STREAM_ROWS", "1")
    small_blocks = open_cpu(name, dtype, tmp_path_factory, threads=2)
    monkeypatch.setenv("ENCAST_BLOCK_ROWS", "1024")
    monkeypatch.setenv("ENCAST_STREAM_ROWS", "1024")
    together_always = open_cpu(name, dtype, tmp_path_factory, threads=2)
    monkeypatch.delenv("ENCAST_BLOCK_ROWS")
    monkeypatch.delenv("ENCAST_STREAM_ROWS")
    several = open_cpu(name, dtype, tmp_path_factory, threads=1, instances=3)
    rng = np.random.default_rng(5)
    for cpu in (one, two, small_chunks, small_blocks, together_always, several):
        for _ in range(4):
            order = rng.permutation(len(texts))
            together = _run(cpu, [texts[index] for index in order], output)
            for index, rows in zip(order, together, strict=True):
                assert same_bits(rows, alone[index])
