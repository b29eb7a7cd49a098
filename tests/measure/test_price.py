"""Prices: what ``--price`` takes, the table and its errors, and dollars per million."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from encast.errors import InputError
from encast.measure.price import Price, cost_record, parse_price, read_prices, share, usd_per_million


def test_the_table_holds_the_articles_machines() -> None:
    prices = read_prices()
    assert {name: prices[name].usd_per_hour for name in ("m5.xlarge", "c5.xlarge", "c5.24xlarge", "g4dn.xlarge")} == {
        "m5.xlarge": 0.192,
        "c5.xlarge": 0.17,
        "c5.24xlarge": 4.08,
        "g4dn.xlarge": 0.526,
    }
    assert prices["c5.24xlarge"].cpus == 96
    assert all(len(price.source) > 10 for price in prices.values())


@pytest.mark.parametrize("text", ["0.17/h", "$0.17/hour", " .17 / h ", "0.170/h"])
def test_an_amount_an_hour(text: str) -> None:
    assert parse_price(text) == Price("$0.17 an hour", 0.17, None, "as given")


def test_a_machine_of_the_table() -> None:
    assert parse_price("c5.xlarge").usd_per_hour == 0.17


@pytest.mark.parametrize("text", ["0.17", "0/h", "-1/h", "nan/h", "1e9/h", "125/month", "", "c5", "9" * 400 + "/h"])
def test_what_is_no_price_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(InputError, match=r"0\.17/h nor a machine of prices\.yaml: m5\.xlarge|more than nothing"):
        parse_price(text)


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ("{", "cannot be read"),
        ("a: 1", "a list of machines"),
        ("- {name: a}", "entry 1: give exactly the fields name, usd_per_hour"),
        ("- {name: a, usd_per_hour: x, cpus: 4, date: 2026-01-02, source: s}", "usd_per_hour is 'x'; give a number"),
        ("- {name: a, usd_per_hour: .inf, cpus: 4, date: 2026-01-02, source: s}", "above 0 and finite"),
        ("- {name: a, usd_per_hour: 1, cpus: yes, date: 2026-01-02, source: s}", "cpus is True; give a whole number"),
        ("- {name: a, usd_per_hour: 1, cpus: 4, date: today, source: s}", "date is 'today'; give a day"),
        ("- &a {name: a, usd_per_hour: 1, cpus: 4, date: 2026-01-02, source: s}\n- *a", "entry 2: 'a' is there"),
    ],
)
def test_a_wrong_table_names_the_entry(tmp_path: Path, table: str, wrong: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(table)
    with pytest.raises(InputError, match=wrong):
        read_prices(path)
    with pytest.raises(InputError, match=str(path)):
        read_prices(path)


def test_dollars_per_million() -> None:
    # 0.17 dollars buy 3,600 seconds, which at 100 a second are 360,000 answers.
    assert usd_per_million(0.17, 100) == pytest.approx(0.17 / 0.36)
    assert cost_record(parse_price("0.17/h"), 100.0) == {
        "usd_per_hour": 0.17,
        "usd_per_million": pytest.approx(0.17 / 0.36),
    }


@pytest.mark.parametrize("rate", [None, 0.0, -1.0, math.nan, math.inf])
def test_no_throughput_has_no_cost(rate: float | None) -> None:
    assert cost_record(parse_price("0.17/h"), rate) is None
    if rate is not None:
        with pytest.raises(InputError, match="above 0"):
            usd_per_million(0.17, rate)


def test_no_price_has_no_cost() -> None:
    assert cost_record(None, 100.0) is None


@pytest.mark.parametrize(
    ("threads", "instances", "cores", "expected"),
    [(1, 1, 2, 0.5), (1, 2, 2, 1.0), (2, None, 4, 0.5), (8, 1, 2, 1.0), (None, 1, 2, None), (1, 1, None, None)],
)
def test_the_share_of_a_machine(
    threads: int | None, instances: int | None, cores: int | None, expected: float | None
) -> None:
    assert share(threads, instances, cores) == expected
