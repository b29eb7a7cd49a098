"""Reports: what is read and what is said; that nothing breaks a page is in ``test_report_hostile``."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from small_reports import FEW, Rows, cell, document, few, tables
from synthetic_rows import BACKENDS, Experiment, everything, write

from encast.bench.report.groups import group_rows, slices
from encast.bench.report.load import load
from encast.bench.report.tradeoffs import pareto_front
from encast.cli.main import main
from encast.errors import InputError
from encast.measure.price import parse_price
from encast.pages import numbers
from encast.pages.document import Document, Figure, Text, to_html, to_markdown


def texts(made: Document) -> str:
    return to_markdown(made)


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, 4, 8, 16)])
def test_every_length_has_its_own_share_of_the_ideal(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Also where the points are too many to stand beside each other."""
    made = Experiment("scaling", backends=FEW)
    rows = []
    for length, share in ((32, 0.5), (512, 0.9)):
        base = made.point("core_scaling", {"length": length, "threads": 1})
        rows += base
        for threads in counts[1:]:
            more = made.point("core_scaling", {"length": length, "threads": threads})
            for row, one in zip(more, base, strict=True):
                row["metrics"]["sequences_per_s"] = share * threads * one["metrics"]["sequences_per_s"]
            rows += more
    report = document(write(tmp_path, rows))
    (table,) = [one for one in tables(report) if "of the ideal, length 32" in [column.title for column in one.columns]]
    for backend in FEW:
        assert cell(report, table.caption, backend, "of the ideal, length 32") == "50%"
        assert cell(report, table.caption, backend, "of the ideal, length 512") == "90%"


def test_a_replay_says_what_it_stands_for(tmp_path: Path) -> None:
    made = Experiment("replay", backends=FEW)
    metrics = {"sampled_sequences": 64, "sequences": 10570}
    rows = made.point("length_replay", {"lengths": "squad", "batch": 1}, metrics=metrics)
    assert "A round replays 64 sequences, which stand for the lengths of 10,570." in texts(
        document(write(tmp_path, rows))
    )


def test_ratios_of_several_groups_are_to_who_was_in_all(tmp_path: Path) -> None:
    """Measured two at a time: encast first, with openvino and then with pytorch."""
    rows = Experiment("groups", backends=FEW).point("latency", {"length": 16, "batch": 1}, noisy=0)
    for row, gone in zip(rows[1:], ("pytorch-f32", "openvino-int8"), strict=True):
        del row["ratio_to"][gone]
    made = document(write(tmp_path / "a", rows))
    assert "as encast-int8 the backend is" in texts(made)
    assert "did not take turns" not in texts(made)
    caption = "latency"
    (table,) = [one for one in tables(made) if "against encast-int8" in [column.title for column in one.columns]]
    assert table.caption.startswith(caption)
    for backend in FEW[1:]:
        assert cell(made, table.caption, backend, "against encast-int8") not in ("", numbers.NOTHING)
    wanted = texts(document(tmp_path / "a", reference="openvino-int8"))
    assert "1 backend did not take turns with openvino-int8 and has no ratio" in wanted


# What is read.


def test_rows_are_found_in_folders_and_below(tmp_path: Path) -> None:
    write(tmp_path / "a", few()[:2])
    write(tmp_path / "b" / "c", few()[2:3])
    assert len(load([tmp_path]).rows) == 3
    assert len(load([tmp_path / "a"]).rows) == 2
    assert len(load([tmp_path / "a", tmp_path]).rows) == 3, "a folder named twice counts once"
    assert len(load([tmp_path / "a" / "rows.jsonl"]).rows) == 2
    assert set(load([tmp_path]).settings.values()) == {"backend: [encast-int8]\n"}


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_rows_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"rows\.jsonl|no folder"):
        load([tmp_path / name])
    assert main(["bench", "report", str(tmp_path / name)]) == 2
    assert "encast bench" in capsys.readouterr().err


def test_a_file_without_a_line_makes_a_page(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert "0 rows" in to_html(document(tmp_path))


def test_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    rows = few()
    for row in rows[:3]:
        row["model"]["sha"] = "abcdef0123456789"
    loaded = load([write(tmp_path, rows)])
    assert {row.model for row in loaded.rows} == {"bert-base (abcdef01)", "bert-base (0f0f0f0f)"}
    assert len(group_rows(loaded.rows)) == 3


def test_the_same_row_measured_again_counts_once(tmp_path: Path) -> None:
    rows = few()
    again = copy.deepcopy(rows[0])
    again["metrics"]["latency_ms"]["p50"] = 123.0
    loaded = load([write(tmp_path, [*rows, again])])
    assert (len(loaded.rows), loaded.replaced) == (len(rows), 1)
    assert loaded.rows[-1].number("metrics", "latency_ms", "p50") == 123.0
    assert "measured again" in texts(document(tmp_path))


BROKEN = {
    "another schema": (json.dumps({**few()[0], "schema": 2}), "schema 2; this version reads 1"),
    "no schema": ("{}", "schema None; this version reads 1"),
    "schema true": (json.dumps({**few()[0], "schema": True}), "schema True"),
    "cut off": (json.dumps(few()[0])[:200], "no JSON"),
    "no object": ("[1, 2]", "a JSON object is expected"),
    "status": (json.dumps({**few()[0], "status": "splendid"}), "status 'splendid'; expected ok, unavailable"),
    "status a list": (json.dumps({**few()[0], "status": []}), r"status \[\]; expected ok"),
    "no backend": (json.dumps({**few()[0], "backend": None}), r"backend\.name is missing"),
    "no scenario": (json.dumps({**few()[0], "scenario": 3}), "scenario is missing"),
    "point": (json.dumps({**few()[0], "point": [1]}), r"point is \[1\]; an object"),
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deeply|levels deep"),
    "deep in a row": (json.dumps({**few()[0], "x": eval("[" * 40 + "]" * 40)}), "levels deep"),
    "long number": ('{"schema": 1' + "0" * 5000 + "}", "integer"),
    "not UTF-8": (b"\xff\xfe\n", "byte 0 is not UTF-8"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_named_and_the_others_count(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, wrong = BROKEN[kind]
    write(tmp_path, few())
    whole = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    broken = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([*whole[:2], broken.strip(b"\n"), b"", *whole[2:]]) + b"\n")
    loaded = load([tmp_path])
    assert len(loaded.rows) == len(few())
    [found] = loaded.broken
    assert (found.line, found.file.split("/")[-1]) == (3, "rows.jsonl")
    assert re.search(wrong, found.reason), found.reason
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert "line 3: " in capsys.readouterr().err
    assert "Broken rows" in (tmp_path / "report.html").read_text()


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "a", few())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rows.jsonl").symlink_to("/proc/self/mem")
    loaded = load([tmp_path])
    assert len(loaded.rows) == len(few())
    assert [one.line for one in loaded.broken] == [0]


# What is said.


def test_numbers_stand_with_their_ratio_interval_and_agreement(tmp_path: Path) -> None:
    made = Experiment("one", backends=FEW)
    rows = made.point("latency", {"length": 128, "batch": 1}, noisy=0)
    rows[0]["metrics"].update({"latency_ms_interval": [9.81, 10.42]})
    rows[0]["metrics"]["latency_ms"]["p50"] = 10.0
    rows[0]["ratio_to"]["openvino-int8"] = {"ratio": 1.4321, "low": 1.4011, "high": 1.4666}
    rows[0]["agreement"].update({"cosine_mean": 1 - 4.2e-3, "largest_difference": 0.0512})
    shown = document(write(tmp_path, rows))
    assert cell(shown, "latency", "encast-int8", "p50, ms") == "10.0 [9.8, 10.4]"
    assert cell(shown, "latency", "encast-int8", "against openvino-int8") == "1.43x [1.40, 1.47]"
    assert cell(shown, "latency", "encast-int8", "1 - cosine") == "0.0042 of 0.03"
    assert cell(shown, "latency", "encast-int8", "largest difference") == "0.051"
    assert cell(shown, "latency", "openvino-int8", "against openvino-int8") == "1x"
    assert cell(document(tmp_path, reference="pytorch-f32"), "latency", "pytorch-f32", "against pytorch-f32") == "1x"


def test_all_that_the_laboratory_measures_has_its_place(tmp_path: Path) -> None:
    made = document(write(tmp_path, list(everything())), price=parse_price("c5.xlarge"))
    titles = [section.title for section in made.sections]
    assert titles[0] == "At a glance"
    for wanted in (
        "Throughput against latency",
        "Dollars per million",
        "Error against speed",
        "What could not run",
        "Fairness and noise",
        "Cold start and memory",
        "Backends",
        "Machine and settings",
    ):
        assert wanted in titles
    captions = [block.caption for section in made.sections for block in section.blocks if isinstance(block, Figure)]
    for wanted in (
        "Latency (p50) in ms against length",
        "Latency (p50) in ms against batch",
        "Latency (p50) in ms against threads",
        "Throughput in sequences/s against instances",
        "Throughput within the limit in sequences/s against length",
        "Latency (p99) in ms against load",
        "Times as fast as pytorch-f32 against length",
    ):
        assert any(caption.startswith(wanted) for caption in captions), wanted
    assert "the page is full" not in to_html(made)
    text = texts(made)
    assert "not installed: the last wheel is for Python 3.8" in text
    assert f"The best 20 of up to {len(BACKENDS)} backends are drawn" in to_html(made)
    assert "ran 8 threads on a budget of 2" in text
    assert "1 row broke the rules of fairness" in text
    assert "c5.xlarge has 4 CPUs, the machine measured here has 2" in text
    for backend in BACKENDS:
        assert backend.replace("_", "\\_") in text


def test_only_plots_for_which_there_is_data(tmp_path: Path) -> None:
    rows = Experiment("one", backends=FEW[:1]).point("latency", {"length": 128, "batch": 1}, noisy=0)
    made = document(write(tmp_path, rows))
    assert not [block for section in made.sections for block in section.blocks if isinstance(block, Figure)]
    assert "At a glance" not in [section.title for section in made.sections], "one backend is no comparison"


@pytest.mark.parametrize(("noisy", "clearly"), [(0.0, "1"), (1.0, "0")])
def test_a_noisy_row_wins_nothing_clearly(tmp_path: Path, noisy: float, clearly: str) -> None:
    rows = Experiment("one", backends=["encast-f32", "openvino-f32"]).point("latency", {"length": 128}, noisy=noisy)
    made = document(write(tmp_path, rows))
    (table,) = [one for one in tables(made) if one.caption == "The fastest of each dtype"]
    columns = [column.title for column in table.columns]
    assert [line[columns.index("of them clearly")].text for line in table.lines] == [clearly]


def test_noise_is_said_where_it_was(tmp_path: Path) -> None:
    rows = few()
    rows[0]["noise"].update(noisy=True, why=["the host took 9.9% of the processors' time"])
    text = texts(document(write(tmp_path, rows)))
    assert "noisy during 1 of 15 measured rows" in text
    assert "the host took 9.9%" in text
    assert re.search(r"\| encast-int8 \| \*\*[\d.]+ \\~\*\*", text), "the row's own number is marked"


def test_the_best_set_up_within_the_limit_is_what_counts(tmp_path: Path) -> None:
    made = Experiment("production", backends=FEW)
    rows: Rows = []
    for batch, within in ((1, 50.0), (4, 80.0), (8, None)):
        for length in (16, 32):
            label = {"length": length, "batch": batch, "instances": 1, "threads": 2}
            slo = {"limit_ms": 20, "percentile": "p99", "latency_ms": 12.0}
            metrics = {"sequences_per_s_within_slo": within, "slo": slo}
            rows += made.point("slo_throughput", label, noisy=0, metrics=metrics)
    shown = document(write(tmp_path, rows))
    caption = "throughput within the limit, sequences/s"
    assert cell(shown, caption, "encast-int8", "length 16") == "80.0 1.00x, batch 4, 1 x 2, p99 12.0 ms"
    for row in rows:
        row["metrics"]["sequences_per_s_within_slo"] = None
    assert "too few calls" in texts(document(write(tmp_path, rows)))
    for row in rows:
        row["metrics"]["slo"]["met"] = False
    shown = document(write(tmp_path, rows))
    assert "over: 12.0 ms" in texts(shown)


def test_the_most_throughput_of_each_backend_with_the_set_up_that_gives_it(tmp_path: Path) -> None:
    made = Experiment("most", backends=FEW)
    rows: Rows = []
    for batch, rates in ((1, (50.0, 40.0)), (8, (80.0, 30.0))):
        for length in (16, 32):
            label = {"length": length, "batch": batch, "instances": 1, "threads": 2}
            for row, rate in zip(made.point("max_throughput", label, noisy=0), rates * 2, strict=False):
                row["metrics"]["sequences_per_s"] = rate
                rows.append(row)
    shown = document(write(tmp_path, rows), price=parse_price("0.36/h"))
    caption = "maximum throughput, sequences/s"
    # Each has its own best set-up, so the ratio is of the two numbers and not of rounds that were paired.
    assert cell(shown, caption, FEW[0], "length 16") == "80.0 2.00x, batch 8, 1 x 2"
    assert cell(shown, caption, FEW[1], "length 16") == "40.0 batch 1, 1 x 2"
    assert "each with the best set-up of its own" in texts(shown)
    (one,) = [one for one in tables(shown) if one.caption.startswith("Dollars per million sequences; below")]
    assert one.lines[0][1].text == "$1.25"


def limited(rate_of: dict[int, float], limit_ms: float, percentile: str = "p99") -> Rows:
    """Rows of ``slo_throughput`` at one length: sequences a second by batch size, a p99 of as many milliseconds as a
    batch has texts."""
    made = Experiment("limit", backends=FEW)
    rows: Rows = []
    for batch, rate in rate_of.items():
        met = batch <= limit_ms
        slo = {"limit_ms": limit_ms, "percentile": percentile, "latency_ms": float(batch), "met": met}
        metrics = {"sequences_per_s": rate, "sequences_per_s_within_slo": rate if met else None, "slo": slo}
        label = {"length": 64, "batch": batch, "instances": 1, "threads": 2}
        rows += made.point("slo_throughput", label, noisy=0, metrics=metrics)
    return rows


def test_a_limit_that_nothing_keeps_has_no_winner_and_no_price(tmp_path: Path) -> None:
    shown = document(write(tmp_path, limited({1: 50.0, 8: 80.0, 16: 90.0}, 0.01)), price=parse_price("0.17/h"))
    assert [one.text for one in shown.sections[0].blocks if isinstance(one, Text)] == [
        "slo_throughput, bert-base: No set-up keeps p99 within 0.01 ms."
    ]
    assert all(one.kind != "best" for table in tables(shown) for line in table.lines for one in line)
    caption = "slo_throughput"
    assert cell(shown, caption, "encast-int8", "p99 within 0.01 ms") == "not kept 1.00 ms"
    assert cell(shown, caption, "encast-int8", "sequences/s within the limit") == numbers.NOTHING
    assert cell(shown, caption, "encast-int8", f"against {FEW[1]}") == numbers.NOTHING
    assert "$" not in texts(shown)
    assert "Throughput against latency" not in [section.title for section in shown.sections]


def test_the_best_set_up_is_named_and_only_what_keeps_the_limit_is_priced(tmp_path: Path) -> None:
    rows = limited({1: 50.0, 4: 80.0, 8: 100.0, 16: 200.0}, 8.0)
    shown = document(write(tmp_path, rows), price=parse_price("0.36/h"))
    [table] = [one for one in tables(shown) if one.caption == "slo_throughput"]
    assert table.lines[0][0].kind == "best"
    setting = "batch, instances x threads"
    assert cell(shown, "slo_throughput", "encast-int8", setting) == "batch 8, 1 x 2"
    assert cell(shown, "slo_throughput", "encast-int8", "p99 within 8 ms") == "kept 8.00 ms"
    assert cell(shown, "slo_throughput", "encast-int8", "sequences/s within the limit") == "100"
    where = "bert-base, length 64, p99 within 8 ms"
    priced = f"Dollars per million sequences: {where}"
    assert cell(shown, priced, "encast-int8", setting) == "batch 8, 1 x 2"
    assert cell(shown, priced, "encast-int8", "per million").startswith("$1.00 ")
    front = next(one for one in tables(shown) if one.caption == f"On the front: {where}")
    assert {line[1].text for line in front.lines} <= {"batch 1, 1 x 2", "batch 4, 1 x 2", "batch 8, 1 x 2"}
    page = to_html(shown)
    assert "latency (p99), ms" in page
    assert "Set-ups that do not keep their limit are left out." in page
    assert "latency (p50), ms" not in page


def test_rows_under_a_limit_are_not_mixed_with_rows_without(tmp_path: Path) -> None:
    rows = limited({1: 50.0, 4: 80.0, 8: 100.0}, 8.0, "p99_9")
    free = Experiment("free", backends=FEW).point("throughput", {"length": 64, "batch": 16}, noisy=0)
    for row in free:
        row["metrics"]["sequences_per_s"] = 1000.0
    shown = document(write(tmp_path, [*rows, *free]), price=parse_price("0.36/h"))
    prices = "Dollars per million sequences; below them batch, instances x threads of the cheapest set-up"
    assert cell(shown, prices, "encast-int8", "bert-base, length 64").startswith("$0.100 ")
    assert cell(shown, prices, "encast-int8", "bert-base, length 64, p99.9 within 8 ms").startswith("$1.00 ")


def test_a_share_of_the_machine_is_never_scaled(tmp_path: Path) -> None:
    made = Experiment("scaling", backends=FEW)
    rows = [
        row
        for instances in (1, 2)
        for row in made.point("instance_scaling", {"length": 128, "instances": instances, "threads": 1}, noisy=0)
    ]
    for row in rows:
        row["metrics"]["sequences_per_s"] = 100.0
    one_core = document(write(tmp_path, rows[:3]), price=parse_price("0.36/h"))
    caption = "Dollars per million sequences: bert-base, length 128"
    assert cell(one_core, caption, "encast-int8", "per million").startswith("≤ $1.00 ")
    assert cell(one_core, caption, "encast-int8", "cores used") == "50%"
    whole = document(write(tmp_path, rows[3:]), price=parse_price("0.36/h"))
    assert cell(whole, caption, "encast-int8", "per million").startswith("$1.00 ")


def test_cost_needs_a_price(tmp_path: Path) -> None:
    rows = few()
    assert "Dollars" not in texts(document(write(tmp_path, rows)))
    for row in rows:
        row["cost"] = {"usd_per_hour": 0.17, "usd_per_million": 1.0}
    assert "as the rows were measured with" in texts(document(write(tmp_path, rows)))


def test_the_pareto_front() -> None:
    points = [(1.0, 10.0), (2.0, 10.0), (2.0, 20.0), (3.0, 15.0), (4.0, 30.0), (1.0, 5.0)]
    assert pareto_front(points) == [0, 2, 4]
    assert pareto_front([]) == []


def test_a_column_that_follows_from_the_axis_divides_no_line(tmp_path: Path) -> None:
    made = Experiment("scaling", backends=FEW[:1])
    rows: Rows = []
    for batch in (8, 16):
        for instances in (1, 2):
            label = {"batch": batch, "instances": instances, "threads": 2 // instances, "part": batch // instances}
            rows += made.point("batch_scaling", label)
    [group] = group_rows(load([write(tmp_path, rows)]).rows)
    found = slices(group.measured, group.columns, "instances")
    assert [(rest, len(members)) for _, rest, members in found] == [({"batch": 8}, 2), ({"batch": 16}, 2)]


# The command.


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "rows", few())
    assert main(["bench", "report", str(folder), "--markdown"]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "report.html"), str(folder / "report.md")]
    assert main(["bench", "report", str(folder), "--json", "--out", str(tmp_path / "new" / "out")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["measured"], said["broken"], said["comparison"]) == (15, 15, [], None)
    assert Path(said["written"][0]).is_file()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ([], "name a folder that `encast bench` has written, such as bench-results/NAME of experiment=NAME"),
        (["{rows}/config.yaml"], "is a file, and no rows.jsonl"),
        (["{rows}/rows.jsonl", "{rows}/config.yaml"], "is a file, and no rows.jsonl"),
        (["{rows}", "--price", "cheap"], "neither an amount"),
        (["{rows}", "--reference", "nobody"], "'nobody' has no row here; there are encast-int8"),
        (["{rows}", "--out", "{rows}/rows.jsonl/x"], "cannot be made"),
        (["--compare", "{rows}", "{rows}/nowhere"], "is no folder"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "rows", few())
    assert main(["bench", "report", *(one.format(rows=folder) for one in arguments)]) == 2
    assert wrong in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "rows", "rows.jsonl"]


def test_a_page_without_a_measured_row_is_refused_with_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = [
        Experiment("none", backends=FEW).failed(backend, "unavailable", "not installed: pip install it")
        for backend in BACKENDS[:5]
    ]
    for rows, why in (
        (failed, f"{BACKENDS[0]} is unavailable: not installed: pip install it; "),
        ([], "no row was measured, it holds none at all"),
    ):
        folder = write(tmp_path / str(len(rows)), rows)
        assert main(["bench", "report", str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"{folder}: no row was measured" in said
        assert why in said
        assert ("; and 2 more)" in said) == bool(rows)
        assert not (folder / "report.html").exists()
    # Beside a measured row the reasons have a place on the page.
    assert main(["bench", "report", str(write(tmp_path / "some", [*failed, *few()]))]) == 0


# Digits.


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, numbers.NOTHING),
        (0.0, "0"),
        (0.7123, "0.712"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (1.23e-7, "1.2e-7"),
        (123456789.0, "123,456,789"),
    ],
)
def test_three_digits(value: float | None, shown: str) -> None:
    assert numbers.amount(value) == shown


def test_units_and_intervals() -> None:
    assert numbers.interval((12.11, 12.62), 12.3) == "[12.1, 12.6]"
    assert numbers.interval((12.31, 12.32), 12.3) == "[12.31, 12.32]", "ends that differ show it"
    assert numbers.interval(None) == ""
    assert [numbers.ratio(value) for value in (0.0123, 0.8, 1.426, 12.34, 234.5)] == [
        "0.012x",
        "0.80x",
        "1.43x",
        "12.3x",
        "234x",
    ]
    assert [numbers.seconds(value) for value in (2.3e-5, 0.0041, 12.0, 340.0)] == ["23 us", "4.1 ms", "12 s", "340 s"]
    assert [numbers.size(value) for value in (12, 3 << 10, 438 << 20, 5 << 30)] == [
        "12 B",
        "3.00 KiB",
        "438 MiB",
        "5.00 GiB",
    ]
    assert [numbers.dollars(value) for value in (0.0624, 0.4721, 12.3, 1234.0)] == [
        "$0.0624",
        "$0.472",
        "$12.30",
        "$1,234",
    ]
