"""``encast`` over a fake engine, as a program: ``fake_encast.py TASK SECONDS_A_RUN VERB ...``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_engine import VOCAB, fake_engine

import encast.engine
from encast.cli.main import main


def _load(artifact: Any, *, batch_tokens: int = 64, **options: Any) -> Any:
    task, seconds = sys.argv[1], float(sys.argv[2])
    engine = fake_engine(task, lambda ids: [ids[1], len(ids), 0.1, -1e-7], batch_tokens=batch_tokens)
    runnable: Any = engine.runnable
    run = runnable.run

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return run(*arguments)

    runnable.run = slow
    return engine


assert VOCAB
encast.engine.load = _load
sys.exit(main(sys.argv[3:]))
