"""The machine's ceilings: what is kept, what is believed of a file, and what the rounds of a measurement say."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from encast import ceilings
from encast.ceilings import CacheLevel, Ceilings, Fingerprint
from encast.ceilings.card import CardCeilings, find_card, keep_card
from encast.ceilings.measure import Rate, judge, rate_of, working_set
from encast.errors import InputError, ResourceError

KIB, MIB = 1 << 10, 1 << 20
HERE = Fingerprint(
    format=1,
    processor="Made-up Processor 9000",
    isa_levels=("scalar", "avx2"),
    features=("avx2", "fma"),
    cores=4,
    threads=4,
    caches=(CacheLevel("L1", 32 * KIB, 1), CacheLevel("L2", MIB, 1), CacheLevel("L3", 32 * MIB, 4)),
)
PEAKS = {"scalar": 1e10, "avx2": 1e11}
READS = {"L1": 4e11, "L2": 2e11, "L3": 1e11, "memory": 2e10}
MEASURED = Ceilings(
    HERE,
    datetime(2026, 2, 3, 4, 5, 6, tzinfo=timezone.utc),
    {(d, i, t): rate * t for d in ("f32", "bf16", "int8") for i, rate in PEAKS.items() for t in (1, 4)},
    {(level, t): rate * (2 if level == "memory" and t == 4 else t) for level, rate in READS.items() for t in (1, 4)},
    55.0,
    ("reads from memory, 4 threads: it was noisy",),
)


@pytest.fixture(autouse=True)
def a_cache_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(Fingerprint, "here", staticmethod(lambda machine=None: HERE))
    monkeypatch.setenv("ENCAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_comes_back() -> None:
    assert ceilings.load() is None
    assert ceilings.find().problem is None
    path = ceilings.keep(MEASURED)
    assert ceilings.load() == MEASURED
    assert ceilings.find() == ceilings.Kept(path, MEASURED)
    assert os.listdir(path.parent) == [path.name]


def test_the_file_says_its_units() -> None:
    document = json.loads(ceilings.keep(MEASURED).read_text())
    assert set(document["instruction_peaks"][0]) == {"dtype", "isa", "threads", "operations_per_second"}
    assert set(document["read_bandwidths"][0]) == {"level", "threads", "bytes_per_second"}
    assert document["handoff_nanoseconds"] == 55.0
    assert document["measured_utc"] == "2026-02-03T04:05:06Z"


@pytest.mark.parametrize(
    "change",
    [
        {"processor": "Other"},
        {"isa_levels": ("scalar",)},
        {"features": ("avx2",)},
        {"cores": 8},
        {"threads": 2},
        {"caches": HERE.caches[:2]},
        {"format": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_machine_does_not_find_it(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    ceilings.keep(MEASURED)
    other = dataclasses.replace(HERE, **change)
    assert other.digest != HERE.digest
    monkeypatch.setattr(Fingerprint, "here", staticmethod(lambda machine=None: other))
    assert ceilings.find().ceilings is None
    assert ceilings.find().problem is None


def _set(*path: str | int, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("format", value=0), "its format is 0, and this version reads 1"),
        (_set("format", value="9" * 500), "its format is"),
        (_set("fingerprint", "processor", value="Other"), "another machine's"),
        (_set("fingerprint", value=None), "another machine's"),
        (_set("measured_utc", value="yesterday"), "measured_utc is 'yesterday'"),
        (_set("instruction_peaks", value=3), "instruction_peaks is no list"),
        (_set("instruction_peaks", 0, value=3), "instruction_peaks is no list"),
        (_set("instruction_peaks", 0, "dtype", value="f16"), "instruction_peaks"),
        (_set("instruction_peaks", 0, "threads", value=True), "threads is True, no count"),
        (_set("instruction_peaks", 0, "threads", value=3), "lacks a count"),
        (_set("instruction_peaks", 0, "operations_per_second", value=-1), "operations_per_second is -1.0, no rate"),
        (_set("instruction_peaks", 0, "operations_per_second", value=1e-320), "no rate"),
        (_set("read_bandwidths", 0, "bytes_per_second", value=1e300), "bytes_per_second is 1e+300, no rate"),
        (_set("instruction_peaks", 0, "operations_per_second", value="fast"), "no number"),
        (_set("instruction_peaks", 0, "operations_per_second", value=float("nan")), "no number"),
        (_set("instruction_peaks", 0, "operations_per_second", value=10**400), "no number"),
        (_set("read_bandwidths", value=[]), "read_bandwidths is not about memory, L1, L2, L3 with [1, 4] threads"),
        (_set("read_bandwidths", 0, "level", value="L9"), "read_bandwidths"),
        (_set("handoff_nanoseconds", value=-1), "handoff_nanoseconds is -1"),
        (_set("doubts", value="none"), "doubts is no list"),
        (_set("doubts", value=[1]), "doubts is no list"),
    ],
)
def test_a_wrong_file_is_reported_and_not_believed(change: Callable[[Any], None], words: str) -> None:
    path = ceilings.keep(MEASURED)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    kept = ceilings.find()
    assert kept.ceilings is None
    assert kept.problem is not None
    assert str(path) in kept.problem
    assert words in kept.problem
    assert len(kept.problem) < 500
    ceilings.keep(MEASURED)  # measuring again mends it
    assert ceilings.load() == MEASURED


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[1]", b"\xff\xfe\x00", b"[" * 100_000, b"1" * 10_000, b" " * (2 << 20)],
    ids=["empty", "cut", "null", "array", "not utf-8", "deep", "long number", "huge"],
)
def test_damage_is_reported_and_no_crash(data: bytes) -> None:
    path = ceilings.keep(MEASURED)
    path.write_bytes(data)
    problem = ceilings.find().problem
    assert problem is not None
    assert f"{path}: holds no ceilings of this machine" in problem


def test_every_cut_of_the_file_is_reported() -> None:
    path = ceilings.keep(MEASURED)
    text = path.read_bytes().rstrip()
    for length in range(0, len(text), 97):
        path.write_bytes(text[:length])
        assert ceilings.find().problem is not None


def test_a_folder_in_the_files_place(a_cache_of_our_own: Path) -> None:
    path = ceilings.keep(MEASURED)
    path.unlink()
    path.mkdir()
    assert "cannot be read (Is a directory)" in (ceilings.find().problem or "")
    with pytest.raises(ResourceError, match="set ENCAST_CACHE_DIR to a folder that can be written"):
        ceilings.keep(MEASURED)
    assert os.listdir(a_cache_of_our_own) == [path.name]  # no temporary file stays


def test_a_file_in_the_folders_place(a_cache_of_our_own: Path) -> None:
    a_cache_of_our_own.write_text("")
    assert "cannot be read" in (ceilings.find().problem or "")
    with pytest.raises(ResourceError, match="cannot be kept there"):
        ceilings.keep(MEASURED)


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ceilings.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("ENCAST_CACHE_DIR", "relative/folder")
    with pytest.raises(InputError, match="ENCAST_CACHE_DIR accepts the absolute path of a folder"):
        ceilings.cache_dir()
    monkeypatch.delenv("ENCAST_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert ceilings.cache_dir() == Path("/caches/encast")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert ceilings.cache_dir() == Path("/home/somebody/.cache/encast")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("ENCAST_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(nobody))
    assert "no home directory" in (ceilings.find().problem or "")
    assert "no home directory" in (find_card("Made-up Card")[1] or "")
    assert ceilings.load() is None
    with pytest.raises(ResourceError, match="set ENCAST_CACHE_DIR"):
        ceilings.keep(MEASURED)


@pytest.mark.parametrize(
    ("bytes", "threads", "level"),
    [
        (1, 1, "L1"),
        (32 * KIB, 1, "L1"),
        (32 * KIB + 1, 1, "L2"),
        (32 * KIB + 1, 2, "L1"),
        (4 * MIB, 4, "L2"),
        (4 * MIB, 1, "L3"),
        (32 * MIB, 4, "L3"),
        (32 * MIB + 1, 4, "memory"),
        (64 * MIB, 5, "L3"),  # a fifth core has another cache of the kind
    ],
)
def test_level_of(bytes: int, threads: int, level: str) -> None:
    assert MEASURED.level_of(bytes, threads) == level


def test_a_machine_that_hides_its_caches_has_memory() -> None:
    assert dataclasses.replace(MEASURED, fingerprint=dataclasses.replace(HERE, caches=())).level_of(1) == "memory"


def test_rates_of_thread_counts_between() -> None:
    assert MEASURED.peak("f32") == 1e11
    assert MEASURED.peak("int8", 4, "scalar") == 4e10
    assert MEASURED.peak("f32", 3) == pytest.approx(3e11)
    assert MEASURED.peak("f32", 9) == 4e11  # there are four cores
    assert MEASURED.read(100 * MIB) == 2e10
    assert MEASURED.read(100 * MIB, 3) == 4e10  # two threads use memory up
    with pytest.raises(KeyError, match="no peak of f16"):
        MEASURED.peak("f16")


@pytest.mark.parametrize("threads", [1, 4])
def test_working_sets_live_where_they_should(threads: int) -> None:
    for level in ("L1", "L2", "L3", "memory"):
        assert MEASURED.level_of(threads * working_set(level, HERE, threads), threads) == level


def test_working_sets_of_odd_machines() -> None:
    # A share of L3 as small as the core's own L2, as servers with caches that exclude each other have it.
    odd = dataclasses.replace(HERE, caches=(CacheLevel("L1", 32 * KIB, 1), CacheLevel("L2", 2 * MIB, 1),
                                            CacheLevel("L3", 8 * MIB, 4)))  # fmt: skip
    assert working_set("L3", odd, 4) == 3 * MIB
    assert working_set("memory", HERE, 1, memory_bytes=64 * MIB) == 16 * MIB


def test_rounds_with_a_waiting_thread_do_not_count_where_threads_share() -> None:
    rounds = [(100.0, 1.0)] * 10 + [(190.0, 0.5)] * 30
    assert rate_of(rounds, shared=False).value == 190
    assert rate_of(rounds, shared=True) == Rate(100, 1.0)


def test_too_few_calm_rounds_are_doubted() -> None:
    one = rate_of([(100.0, 1.0)] + [(150.0, 0.6)] * 30, shared=True)
    assert one.running == 0.6
    assert judge([one, one]) == (150, "other processes left a thread 60% of the time")


def test_one_lucky_round_does_not_decide() -> None:
    assert rate_of([(100.0, 1.0)] * 19 + [(500.0, 1.0)], shared=False).value == 100


def test_passes_that_disagree_are_doubted() -> None:
    assert judge([Rate(100, 1.0), Rate(97, 1.0)]) == (100, None)
    value, doubt = judge([Rate(100, 1.0), Rate(50, 1.0)])
    assert value == 100
    assert doubt == "a measurement seconds earlier or later gave 50% less"
    # A disturbed pass is no witness against calm ones.
    assert judge([Rate(100, 1.0), Rate(190, 0.4)]) == (100, None)


CARD = CardCeilings(
    "Made-up Card", datetime(2026, 2, 3, 4, 5, 6, tzinfo=timezone.utc), {"f16": 7e14, "f8": 1.4e15}, 3e12
)


def test_a_card_is_kept_by_its_name() -> None:
    assert find_card(CARD.card) == (None, None)
    keep_card(CARD)
    assert find_card(CARD.card) == (CARD, None)
    assert find_card("Another Card") == (None, None)
    assert ceilings.load() is None, "a card is no processor"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("format", value=2), "its format is not 1"),
        (_set("card", value="Another Card"), "another card's"),
        (_set("operations_per_second", "f16", value=0), "no rate"),
        (_set("operations_per_second", value=[]), "operations_per_second is no object"),
        (_set("memory_bytes_per_second", value="fast"), "no number"),
        (_set("measured_utc", value=1), "measured_utc is 1, no date"),
    ],
)
def test_a_wrong_file_of_a_card_is_not_believed(change: Callable[[Any], None], words: str) -> None:
    path = keep_card(CARD)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    found, problem = find_card(CARD.card)
    assert found is None
    assert problem is not None
    assert words in problem
