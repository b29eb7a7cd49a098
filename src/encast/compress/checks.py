"""What a look at the data, the recipe and the checkpoint shows, before hours of training."""

from __future__ import annotations

from pathlib import Path

from encast.archs import build_graph
from encast.compress.batches import lengths_of
from encast.compress.model import LAYER, head_labels, kept_layers, longest_text, open_tokenizer
from encast.compress.recipe import Distil, Prune, Quantise, Recipe, Training
from encast.compress.stages import Context, examples_of, takes_unlabelled
from encast.compress.tasks import find_task
from encast.compress.teacher import check_teacher
from encast.data.datasets import Dataset, Labelled
from encast.errors import InputError
from encast.importers import Checkpoint
from encast.scoring import METRICS, metrics_of, need_bio, need_measurable
from encast.sparsity import product_weights

__all__ = ["check_run", "need_texts_taught"]


def check_run(checkpoint: Checkpoint, recipe: Recipe, context: Context) -> None:
    """Raises ``InputError`` naming the stage and what is wrong."""
    _check_data(context)
    _check_unlabelled(recipe, context)
    _check_metric(context.metric, context)
    layers = build_graph(checkpoint, "features").meta.layers
    if context.task == "embed" or not any(isinstance(stage, Training) for stage in recipe.stages):
        find_task(context.task, context.train)
        build_graph(checkpoint, context.task)  # says where the head is missing or another one, which no stage makes
    names = recipe.names()
    for stage, name in zip(recipe.stages, names, strict=True):
        try:
            if isinstance(stage, Quantise):
                _check_quantise(stage, context)
            else:
                assert isinstance(stage, Training)
                layers = _layers_left(stage, layers, checkpoint)
                _check_training(stage, checkpoint, layers, names, context)
        except InputError as error:
            raise InputError(f"the stage {name}: {error}") from None


def _check_data(context: Context) -> None:
    train, dev = context.train, context.dev
    if train.kind == "entities":
        need_bio(train)
    if dev is None:
        return
    if dev.kind != train.kind:
        raise InputError(f"{train.name} holds {train.kind}, {dev.name} {dev.kind}; give two sets of one kind")
    first, judged = train.rows[0], dev.rows[0]
    if isinstance(first, Labelled) and type(first.text) is not type(judged.text):
        form = ("single texts", "pairs") if isinstance(first.text, str) else ("pairs", "single texts")
        raise InputError(f"{train.name} has {form[0]}, {dev.name} {form[1]}; give rows of the same form")
    if train.kind == "classes":
        known = {str(row.gold) for row in train.rows}
        strange = next((row.gold for row in dev.rows if str(row.gold) not in known), None)
        if strange is not None:
            raise InputError(
                f"{dev.name} has the class {strange!r}, of which {train.name} has no row; its classes are "
                f"{', '.join(sorted(known)[:20])}"
            )
    if dev.kind == "entities" and all(label == "O" for row in dev.rows for label in row.labels):
        raise InputError(f"{dev.name} has no entity, all its labels are O; give a dev set that has some")
    if dev.kind == "scores" and len({row.gold for row in dev.rows}) < 2:
        raise InputError(f"{dev.name} has {len(dev.rows)} rows of one score; a correlation needs two scores at least")
    need_measurable(dev, context.task)


def _check_unlabelled(recipe: Recipe, context: Context) -> None:
    texts, train = context.unlabelled, context.train
    if texts is None:
        return
    if not any(isinstance(stage, Training) and takes_unlabelled(stage) for stage in recipe.stages):
        raise InputError(
            f"{texts.name} has no labels, and no stage learns from a teacher alone; add `distil` with hard 0 to one, "
            "or leave it out"
        )
    need_texts_taught(texts.name, train)
    first = train.rows[0]
    pairs = not isinstance(first, Labelled) or isinstance(first.text, tuple)
    if pairs != isinstance(texts.rows[0], tuple):
        form = ("pairs", "single texts") if pairs else ("single texts", "pairs")
        raise InputError(f"{train.name} has {form[0]}, {texts.name} {form[1]}; give rows of the same form")


def need_texts_taught(name: str, train: Dataset) -> None:
    """Raises ``InputError`` where the task of the training rows takes no texts without labels; ``name``: of these."""
    if train.kind == "entities":
        raise InputError(f"{name}: labels of words are not learned from a teacher's answers for texts; leave it out")


def _check_quantise(stage: Quantise, context: Context) -> None:
    if stage.max_drop is not None and context.dev is None:
        raise InputError("an accuracy budget needs a dev set; give one")
    if stage.metric is not None:
        _check_metric(stage.metric, context)


def _check_metric(metric: str, context: Context) -> None:
    train = context.train
    known = metrics_of(train)
    if metric not in known:
        why = f" where there are not two classes, as in {train.name}" if metric in METRICS[train.kind] else ""
        raise InputError(f"metric is {metric!r}; for {train.kind}{why} it is one of {', '.join(known)}")


def _check_training(stage: Training, checkpoint: Checkpoint, layers: int, names: list[str], context: Context) -> None:
    limit = longest_text(checkpoint, stage.max_length)
    task = find_task(context.task, context.train)(context.train, limit, stage.stride)
    if stage.batch_size == 1 and context.train.kind == "pairs" and not takes_unlabelled(stage):
        raise InputError("pairs learn from the other pairs of their batch, and batch-size is 1; give 2 or more")
    if stage.accumulate > 1 and context.train.kind == "pairs":
        raise InputError("pairs learn from the other pairs of their batch, which accumulate would part; leave it 1")
    _check_stride(stage, limit, checkpoint, context)
    if (labels := head_labels(checkpoint, task)) is not None:
        task.adopt(labels)
    if isinstance(stage, Prune):
        _check_keep(stage, checkpoint, layers)
    distil = stage.distil if isinstance(stage, (Prune, Distil)) else None
    if distil is not None and distil.teacher not in names:
        if not Path(distil.teacher).exists():
            raise InputError(
                f"teacher is {distil.teacher!r}; a stage before ({', '.join(names)}), or the folder of a checkpoint is "
                "needed"
            )

        def longest() -> int:
            return int(lengths_of(examples_of(stage, checkpoint, context)[1]).max())

        check_teacher(Path(distil.teacher), checkpoint, layers, task, distil, longest)


def _check_keep(stage: Prune, checkpoint: Checkpoint, layers: int) -> None:
    """That its patterns match some weights each, and not all, of the ``layers`` that the stages before leave."""

    def without(keep: tuple[str, ...]) -> set[str]:
        numbers = {name: LAYER.search(name) for name in product_weights(checkpoint, keep)}
        return {name for name, match in numbers.items() if match is None or int(match[1]) < layers}

    gone = next((one for one in stage.keep if without((one,)) == without(())), None)
    if gone is not None:
        raise InputError(
            f"the pattern {gone!r} in keep matches weights of layers alone that a stage before leaves out; the "
            f"{layers} that stay are numbered from 0"
        )
    if not without(stage.keep):
        raise InputError(
            f"keep is {', '.join(stage.keep)}, which leaves no weight to prune; name fewer, or take fine-tune"
        )


def _check_stride(stage: Training, limit: int, checkpoint: Checkpoint, context: Context) -> None:
    """That the stride fits into every window, which holds what its question leaves of it."""
    if context.train.kind != "answers" or stage.stride is None:
        return
    if stage.stride < (limit - checkpoint.tokenizer.special_count) // 2:
        return  # a question takes half of a window at most
    asked = {row.question for row in context.train.rows}
    if context.unlabelled is not None and takes_unlabelled(stage):
        asked |= {question for question, _ in context.unlabelled.rows}
    tokenizer = open_tokenizer(checkpoint, limit)
    for question in sorted(asked):
        tokenizer.windows(question, "", stage.stride)


def _layers_left(stage: Training, layers: int, checkpoint: Checkpoint) -> int:
    if not isinstance(stage, Distil) or stage.layers is None:
        return layers
    return len(kept_layers(stage.layers, checkpoint.tensors, layers))
