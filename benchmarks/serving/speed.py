"""Bars of speed: the offline rate, clients against infinity, one client alone, mixed lengths."""

from __future__ import annotations

import base64
import contextlib
import json
import time
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from loads import Bare, Texts, body_of, closed, model_of, poisson, reference
from report import held, middle, ratio_text, table
from servers import Encast, Infinity, Offline, Server, engines_of_infinity

from encast.loadtest import Result
from encast.loadtest.records import REJECTED
from encast.measure.processes import cpu_time
from encast.measure.statistics import latency_metrics, ratio_interval

__all__ = ["clients", "mixed", "offline", "one"]

LEAST_COSINE = 0.98
"""Of a quantised model's answers to those in f32, on average, to count as the same model."""

PAUSE_S = 0.3
"""Between turns: what the last one woke goes to sleep."""


def turns(number: int, names: list[str]) -> list[str]:
    """The order of a round, every second one the other way round."""
    time.sleep(PAUSE_S)
    return names[:: -1 if number % 2 else 1]


def offline(args: Namespace, folder: Path) -> dict[str, Any]:
    """Requests of 32 paragraphs from closed-loop clients, against ``Engine.embed`` of all 1,024 at once."""
    texts = Texts.paragraphs(args.artifact, args.data, folder)
    rates: dict[str, list[float]] = {"server": [], "offline": []}
    shares = []
    with Encast(args.artifact, folder, args.serve) as server, Offline(args.artifact, texts.file) as engine:
        known = reference(engine, texts, folder)
        for number in range(args.rounds):
            for who in turns(number, list(rates)):
                if who == "server":
                    found = closed(server.url, args.clients, args.seconds, [texts], batch=args.batch, reference=known)
                    need_right(found)
                    rates[who].append(float(found.rates()["texts_per_s"] or 0))
                    shares.append(found.core_share)
                else:
                    answer = engine.ask(do="rate", seconds=args.seconds)
                    rates[who].append(answer["texts"] / answer["seconds"])
                time.sleep(PAUSE_S)
    ratio = ratio_interval(rates["server"], rates["offline"])
    rows = {who: middle(values) for who, values in rates.items()}
    print(f"{args.clients} closed-loop clients, requests of {args.batch} paragraphs; {args.rounds} rounds")
    table(["", "paragraphs a second", "interval"], [(who, row["median"], span(row)) for who, row in rows.items()])
    bar = held("server over offline at least 0.9", ratio_text(ratio), ratio.ratio >= 0.9)
    return {"rates": rows, "ratio": ratio.record(), "client_core_share": shares, "bars": [bar]}


def one(args: Namespace, folder: Path) -> dict[str, Any]:
    """One query at a time by a bare blocking socket, against ``Engine.embed`` of the same queries."""
    texts = Texts.queries(args.data, folder)
    medians: dict[str, list[float]] = {"server": [], "offline": []}
    with Encast(args.artifact, folder, args.serve) as server, Offline(args.artifact, texts.file) as engine:
        model, client = model_of(server.url), Bare(server.url)
        for number in range(-1, args.rounds):  # the first one warms up
            begin = (number + 1) * args.calls % len(texts.rows)
            chosen = (texts.rows * 2)[begin : begin + args.calls]
            for who in turns(number, list(medians)):
                if who == "server":
                    answers = [client.ask(Bare.request(body_of(model, [text]))) for text in chosen]
                    if any(status != 200 for status, _ in answers):
                        raise SystemExit(f"the server answered {sorted({status for status, _ in answers})}")
                    ns = [took for _, took in answers]
                else:
                    ns = engine.ask(do="latency", texts=chosen)["ns"]
                if number >= 0:
                    medians[who].append(float(np.median(ns)) / 1e6)
                time.sleep(PAUSE_S)
    added = [server - alone for server, alone in zip(medians["server"], medians["offline"], strict=True)]
    rows = {**{who: middle(values) for who, values in medians.items()}, "server adds": middle(added)}
    print(f"one client, a bare blocking socket; {args.rounds} rounds of {args.calls} queries each")
    table(["", "median, ms", "interval"], [(who, row["median"], span(row)) for who, row in rows.items()])
    most = rows["server adds"]["median"]
    return {**rows, "bars": [held("the server adds at most 0.6 ms at the median", f"{most:.3f} ms", most <= 0.6)]}


def clients(args: Namespace, folder: Path) -> dict[str, Any]:
    """Single queries from closed-loop clients, encast beside infinity's fastest CPU engine in the same rounds."""
    texts = Texts.queries(args.data, folder)
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {"encast": stack.enter_context(Encast(args.artifact, folder, args.serve))}
        with Offline(args.artifact, texts.file) as engine:
            known = reference(engine, texts, folder)
        need_right(closed(servers["encast"].url, 64, min(2.0, args.seconds), [texts], reference=known))
        tried: dict[str, Any] = {}
        if args.infinity:
            servers["infinity"], tried = fastest_infinity(args, texts, folder, stack)
            both = [embeddings(server, texts.rows[:64]) for server in servers.values()]
            tried["cosine_of_encast"] = float((both[0] * both[1]).sum(1).mean())
            print(f"encast's answers have a mean cosine of {tried['cosine_of_encast']:.4f} to infinity's", flush=True)
        found: dict[tuple[int, str], list[Result]] = {}
        idle: list[float] = []
        for number in range(args.rounds):
            for count in args.clients:
                for who in turns(number, list(servers)):
                    others = [process for name, one in servers.items() if name != who for process in one.family]
                    before = cpu_time(others)
                    result = closed(servers[who].url, count, args.seconds, [texts])
                    after = cpu_time(others)
                    idle.append((after.cpu - before.cpu) / (after.at - before.at))
                    need_answers(result)
                    found.setdefault((count, who), []).append(result)
                    time.sleep(PAUSE_S)
    rows = {f"{count} {who}": row_of(results) for (count, who), results in found.items()}
    print(f"single queries, closed loop; {args.rounds} rounds of {args.seconds:g} s a turn")
    table(
        ["clients", "server", "queries a second", "interval", "p50, ms", "p99, ms", "refused", "client's core"],
        [
            (
                count, who, (row := rows[f"{count} {who}"])["rate"]["median"], span(row["rate"]),
                row["latency_ms"]["p50"], row["latency_ms"]["p99"], row["refused"],
                f"{row['client_core_share']:.0%}",
            )
            for count, who in found
        ],
    )  # fmt: skip
    ratios, bars = {}, []
    for count in args.clients if args.infinity else ():
        ours, theirs = (rows[f"{count} {who}"] for who in ("encast", "infinity"))
        ratio = ratio_interval(ours["rate"]["rounds"], theirs["rate"]["rounds"])
        ratios[count] = ratio.record()
        print(f"{count} clients: {ratio_text(ratio)} times infinity's rate")
        if count == 64:
            bars.append(held("64 clients: at least 4 times infinity's rate", ratio_text(ratio), ratio.ratio >= 4))
            p99 = [row["latency_ms"]["p99"] for row in (ours, theirs)]
            bars.append(held("64 clients: a lower p99", p99, None if None in p99 else p99[0] < p99[1]))
    return {"rows": rows, "ratios": ratios, "infinity": tried, "idle_core_share": max(idle), "bars": bars}


def fastest_infinity(
    args: Namespace, texts: Texts, folder: Path, stack: contextlib.ExitStack
) -> tuple[Server, dict[str, Any]]:
    """The fastest of its engines at 64 clients whose answers are the model's, running, and what each did. Each is tried
    alone: idle ones may spin.
    """
    setups = engines_of_infinity(args.infinity, args.infinity_model, folder)
    exact = next(iter(setups))  # the checkpoint as it is, in f32

    def start(name: str) -> Server:
        model, options = setups[name]
        server = Infinity(args.infinity, model, options, folder, "".join(filter(str.isalnum, name)))
        try:
            server.wait_ready()
        except BaseException:
            server.end()
            raise
        return server

    if args.engine:
        return stack.enter_context(start(args.engine)), {"chosen": args.engine}
    tried: dict[str, Any] = {name: {"rates": [], "options": setups[name][1]} for name in setups}
    vectors: dict[str, Any] = {}
    for heat in range(args.heats):
        for name in setups if heat == 0 else turns(heat, list(setups)):
            one = tried[name]
            if "excluded" in one:
                continue
            try:
                server = start(name)
            except SystemExit as error:
                one["excluded"] = str(error)[-300:]
                continue
            with server:
                vectors[name] = embeddings(server, texts.rows[:64])
                one["cosine"] = float((vectors[name] * vectors[exact]).sum(1).mean())
                if one["cosine"] < LEAST_COSINE:
                    one["excluded"] = f"the mean cosine of its answers to f32's is {one['cosine']:.3f}"
                    continue
                result = closed(server.url, 64, args.seconds, [texts])
                one["rates"].append(float(result.rates()["requests_per_s"] or 0))
    for name, one in tried.items():
        print(f"infinity, {name}: {one.get('excluded') or one['rates']}", flush=True)
    best = max((name for name in tried if "excluded" not in tried[name]), key=lambda name: sum(tried[name]["rates"]))
    print(f"infinity's engine: {best}", flush=True)
    return stack.enter_context(start(best)), {"tried": tried, "chosen": best}


def embeddings(server: Server, texts: list[str]) -> Any:
    """``f64[texts, hidden]`` of length 1, as the server answers."""
    body = body_of(model_of(server.url), texts)
    request = urllib.request.Request(f"{server.url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        rows = [base64.b64decode(one["embedding"]) for one in json.load(response)["data"]]
    vectors = np.array([np.frombuffer(row, "<f4") for row in rows], np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def mixed(args: Namespace, folder: Path) -> dict[str, Any]:
    """Short and long texts by turns, open loop: the default scheduling beside one line, first come, first served."""
    short = Texts.of_tokens("queries", args.short, args.artifact, args.data, folder)
    long = Texts.of_tokens("paragraphs", args.length, args.artifact, args.data, folder)
    both = [short, long]
    found: dict[tuple[float, str], list[Result]] = {}
    with contextlib.ExitStack() as stack:
        servers = {
            "default": stack.enter_context(Encast(args.artifact, folder, args.serve, "default")),
            "first come, first served": stack.enter_context(
                Encast(args.artifact, folder, [*args.serve, "--slowdown", "0"], "fcfs")
            ),
        }
        capacity: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(3):
            for who in turns(number, list(servers)):
                result = closed(servers[who].url, args.clients, args.seconds, both)
                need_all(result)
                capacity[who].append(float(result.rates()["requests_per_s"] or 0))
        # The smaller of the two: neither is beyond its own.
        most = min(float(np.median(rates)) for rates in capacity.values())
        for number in range(args.rounds):
            for share in args.shares:
                for who in turns(number, list(servers)):
                    result = poisson(servers[who].url, share * most, args.seconds, both, seed=number)
                    need_answers(result)
                    found.setdefault((share, who), []).append(result)
    document: dict[str, Any] = {"capacity": capacity, "rows": {}, "bars": []}
    print(f"half texts of {args.short} tokens, half of {args.length}; capacity {most:.1f} requests a second")
    rows = []
    for (share, who), results in found.items():
        own = {kind.source.name: nanoseconds(results, number) for number, kind in enumerate(both)}
        row = {kind: latency_metrics(ns)["latency_ms"] for kind, ns in own.items()}
        document["rows"][f"{share} {who}"] = row
        rows.append((share, who, *(row[kind][which] for kind in own for which in ("p50", "p99"))))
    heads = [f"{kind.source.name} {which}, ms" for kind in both for which in ("p50", "p99")]
    table(["load", "scheduling", *heads], rows)
    for share in args.shares:
        p99s = [
            [float(np.percentile(ns, 99)) for ns in nanoseconds(found[share, who], 0)]
            for who in ("default", "first come, first served")
        ]
        ratio = ratio_interval(*p99s)
        bar = f"load {share:g}: the queries' p99 at most a third of first come, first served"
        document["bars"].append(held(bar, ratio_text(ratio), ratio.ratio <= 1 / 3))
    return document


# Results


def nanoseconds(results: list[Result], source: int | None = None) -> list[Any]:
    """Latencies of what was answered, by round."""
    rounds = []
    for result in results:
        own = result.answered if source is None else result.answered.where(result.answered.source == source)
        rounds.append(own.responses.latency)
    return rounds


def row_of(results: list[Result]) -> dict[str, Any]:
    return {
        "rate": middle([float(one.rates()["requests_per_s"] or 0) for one in results]),
        **latency_metrics(nanoseconds(results)),
        "client_core_share": float(np.median([one.core_share for one in results])),
        "refused": sum(len(one.columns.of(REJECTED)) for one in results),
    }


def need_answers(result: Result) -> None:
    if result.failed:
        raise SystemExit(f"requests failed: {result.errors or 'none was answered'} {dict(result.examples)}")


def need_all(result: Result) -> None:
    """Of a closed loop: a client that is refused waits, so the rate would not be the server's."""
    need_answers(result)
    if refused := len(result.columns.of(REJECTED)):
        raise SystemExit(f"{refused} requests of a closed loop were refused; give fewer --clients")


def need_right(result: Result) -> None:
    need_all(result)
    if result.first_wrong:
        raise SystemExit(f"a wrong answer: {result.first_wrong}")


def span(row: dict[str, Any]) -> str:
    return "-" if row["interval"] is None else "{:.4g} to {:.4g}".format(*row["interval"])
