"""What the runtimes beside this file answer: the reference's numbers, each row of the batch as far as its mask says.

``fake_how.json`` in the module path says what they do besides: ``inputs`` that they have, ``share`` of the answers that
is added to them, ``config``: what is other in ``bert_config.json``, ``outputs``, ``raises``, ``sleeps``, ``prints``,
``writes``: a file, ``tells``: the environment, as an error, ``signal``: by which they end, ``size``: of the only batch
that they take.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.importers import open_checkpoint

HOW = json.loads(next(path for one in sys.path if (path := Path(one, "fake_how.json")).exists()).read_text())


class Model:
    def __init__(self, path: str) -> None:
        if "prints" in HOW:
            os.write(1, HOW["prints"].encode())
            atexit.register(os.write, 1, HOW["prints"].encode())
            print(HOW["prints"], file=sys.stderr)
        if "writes" in HOW:
            with open(HOW["writes"], "w") as file:
                file.write("written")
        if "tells" in HOW:
            raise RuntimeError(" ".join(sorted(os.environ)))
        if "raises" in HOW:
            raise RuntimeError(HOW["raises"])
        if "signal" in HOW:
            os.kill(os.getpid(), HOW["signal"])
        time.sleep(HOW.get("sleeps", 0))
        if "config" in HOW:
            path = shutil.copytree(path, tempfile.mkdtemp() + "/other")
            config = Path(path, "bert_config.json")
            config.write_text(json.dumps({**json.loads(config.read_text()), **HOW["config"]}))
        self.reference = Reference(build_graph(open_checkpoint(path)))

    @property
    def graph(self) -> Any:
        return self.reference.graph

    def rows(self, output: str, ids: Any, mask: Any, types: Any) -> Any:
        """Of every text: rows of its tokens, and 7 for padding; of a text's own output the row."""
        assert list(ids.shape) == HOW.get("size", list(ids.shape))
        assert mask.any(axis=1).all()
        assert set(np.unique(mask)) <= {0, 1}
        width = self.graph.type_of(self.graph.outputs[output]).shape[1]
        of_texts = output == "logits" and self.graph.meta.task == "classify"
        rows = np.full((len(ids), width) if of_texts else (*ids.shape, width), 7.0)
        for row, one, kinds, used in zip(rows, ids, types, mask, strict=True):
            length = int(used.sum())
            batch = Batch.of([one[:length].tolist()], [kinds[:length].tolist()])
            select = np.arange(length, dtype=np.int32) if self.graph.meta.task == "fill_mask" else None
            found = self.reference.run(output, batch, select)
            row[: None if of_texts else length] = found[0] if of_texts else found
        return rows * (1 + float(HOW.get("share", 0)))
