"""Tokens a second of fine-tuning MiniLM on SST-2: encast compress beside transformers.Trainer, by turns in one run.

    python benchmarks/training.py CHECKPOINT ../shared/data/glue/SST-2 [--rows 2048] [--rounds 5]

Both train all weights in f32 on the same rows, 32 a step, with the same optimiser (fused AdamW), learning rate, decay
and clipping. The Trainer has its default settings and pads each batch to its longest row (``DataCollatorWithPadding``);
rows are tokenised before the clock starts. A round is one epoch of each on the same
random part of the rows; tokens are those of the rows, without padding. Needs the extra ``train`` and ``accelerate``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from encast.compress.batches import Example
from encast.compress.model import load_model, open_tokenizer
from encast.compress.recipe import FineTune
from encast.compress.state import StateFolder
from encast.compress.tasks import find_task
from encast.compress.train import Trainer
from encast.data.datasets import open_dataset
from encast.importers import open_checkpoint
from encast.measure.statistics import ratio_interval

BATCH = 32


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, examples: list[Example]) -> None:
        self._rows = examples

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        return {
            "input_ids": row.ids[0].tolist(),
            "token_type_ids": row.types[0].tolist(),
            "attention_mask": [1] * row.tokens,
            "labels": row.target,
        }


def ours(checkpoint: Any, task: Any, examples: list[Example], seed: int) -> float:
    model = load_model(checkpoint, task, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        stage = FineTune(epochs=1, batch_size=BATCH, evaluations=0)
        trainer = Trainer(model, stage, examples, products=[], state=StateFolder(Path(folder)), seed=seed)
        began = time.perf_counter()
        trainer.run()
        return time.perf_counter() - began


def theirs(checkpoint: Any, task: Any, examples: list[Example], seed: int) -> float:
    model = load_model(checkpoint, task, seed=seed).module
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint.path))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            learning_rate=5e-5,
            warmup_steps=0.1,
            weight_decay=0.01,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            seed=seed,
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Rows(examples),
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
        )
        began = time.perf_counter()
        trainer.train()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("data")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.checkpoint)
    data = open_dataset(options.data, split="train")
    task = find_task("classify", data)(data, 128, 0)
    every = list(task.examples(data.rows, open_tokenizer(checkpoint, 128)))
    rates: dict[str, list[float]] = {"encast": [], "transformers.Trainer": []}
    for round_ in range(options.rounds):
        chosen = np.random.default_rng(round_).choice(len(every), options.rows, replace=False)
        examples = [every[index] for index in chosen]
        tokens = sum(row.tokens for row in examples)
        order = [("encast", ours), ("transformers.Trainer", theirs)]
        for name, run in order if round_ % 2 else order[::-1]:
            rates[name].append(tokens / run(checkpoint, task, examples, round_))
        print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
    found = ratio_interval(rates["encast"], rates["transformers.Trainer"])
    medians = {name: round(float(np.median(values))) for name, values in rates.items()}
    print(f"tokens a second, medians of {options.rounds} rounds: {medians}; ratio {found.record()}")


if __name__ == "__main__":
    main()
