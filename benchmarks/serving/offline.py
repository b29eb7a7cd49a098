"""The offline engine in a process of its own: reads orders as JSON lines, answers each with one.

    python offline.py ARTIFACT TEXTS.json

``{"do": "rate", "seconds": S}``: embeds the whole list of texts again and again for so long.
``{"do": "latency", "texts": [...]}``: embeds one after the other; nanoseconds of each.
``{"do": "reference", "path": P, "texts": [...]}``: writes the texts with their embeddings, as ``encast loadtest
--reference`` reads them.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import encast


def main(artifact: str, texts_file: str) -> None:
    texts: list[str] = json.loads(Path(texts_file).read_text(encoding="utf-8"))
    with encast.load(artifact) as engine:

        def rate(seconds: float) -> dict[str, Any]:
            begin, done = time.perf_counter(), 0
            while time.perf_counter() < begin + seconds:
                engine.embed(texts)
                done += len(texts)
            return {"texts": done, "seconds": time.perf_counter() - begin}

        def latency(texts: list[str]) -> dict[str, Any]:
            ns = []
            for text in texts:
                begin = time.perf_counter_ns()
                engine.embed([text])
                ns.append(time.perf_counter_ns() - begin)
            return {"ns": ns}

        def reference(path: str, texts: list[str]) -> dict[str, Any]:
            with open(path, "w", encoding="utf-8") as file:
                for text, row in zip(texts, engine.embed(texts), strict=True):
                    known = base64.b64encode(row.astype("<f4").tobytes()).decode()
                    print(json.dumps({"text": text, "embedding": known}), file=file)
            return {}

        orders = {"rate": rate, "latency": latency, "reference": reference}
        engine.embed(texts[:8])
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(orders[order.pop("do")](**order)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
