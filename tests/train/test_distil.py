"""Distillation: the losses by their formulas, the teacher's answers, and students with fewer layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import make_checkpoint
from gluon_files import write_gluon
from small_rows import classes

import encast
from encast.compress.batches import Example
from encast.compress.model import evenly, load_model, open_tokenizer
from encast.compress.pipeline import compress, prepare
from encast.compress.recipe import Distil, parse_recipe
from encast.compress.state import StateFolder
from encast.compress.tasks import TrainTask, find_task
from encast.compress.teacher import CachedTeacher, OnlineTeacher, cache_answers
from encast.compress.train import Trainer
from encast.data.datasets import Dataset, Labelled, Question, Sentence, open_dataset
from encast.errors import EncastError, InputError, ResourceError
from encast.importers import open_checkpoint

ROWS: dict[str, tuple[str, list[Any]]] = {
    "classify": ("classes", [Labelled("the", "a"), Labelled("of", "b"), Labelled("in", "c")]),
    "tag": ("entities", [Sentence(("the", "of"), ("O", "B-x"))]),
    "answer": ("answers", [Question("1", "the", "of and", ("and",), (3,))]),
}


def task_of(name: str) -> TrainTask:
    kind, rows = ROWS[name]
    data = Dataset("here", kind, rows)
    return find_task(name, data)(data, 48, 8)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def divergence(student: np.ndarray, teacher: np.ndarray, temperature: float) -> np.ndarray:
    """T^2 KL(teacher || student), float64, as Hinton et al. have it."""
    p, q = softmax(teacher / temperature), softmax(student / temperature)
    return temperature**2 * (p * (np.log(p) - np.log(q))).sum(-1)


def test_classes_soft_loss() -> None:
    generator = np.random.default_rng(0)
    student, teacher = generator.normal(size=(2, 5, 3)) * 3
    found = task_of("classify").soft_loss(*map(torch.tensor, (student, teacher)), torch.ones(5, 4).bool(), 2.0)
    assert float(found) == pytest.approx(divergence(student, teacher, 2.0).mean())


def test_tags_soft_loss_leaves_padding_out() -> None:
    generator = np.random.default_rng(0)
    student, teacher = generator.normal(size=(2, 2, 4, 3))
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    found = task_of("tag").soft_loss(*map(torch.tensor, (student, teacher, mask)), 3.0)
    assert float(found) == pytest.approx(divergence(student, teacher, 3.0)[mask].mean())


def test_spans_soft_loss_is_over_the_tokens_of_a_row() -> None:
    generator = np.random.default_rng(0)
    student, teacher = generator.normal(size=(2, 2, 4, 2))
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
    found = task_of("answer").soft_loss(*map(torch.tensor, (student, teacher, mask)), 2.0)
    expected = np.mean(
        [
            divergence(student[row, : mask[row].sum(), part], teacher[row, : mask[row].sum(), part], 2.0)
            for row in (0, 1)
            for part in (0, 1)
        ]
    )
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("count", "wanted", "places"), [(6, 3, [0, 2, 5]), (12, 6, [0, 2, 4, 7, 9, 11]), (4, 1, [0])])
def test_layers_are_evenly_spaced(count: int, wanted: int, places: list[int]) -> None:
    assert evenly(count, wanted) == places


@pytest.mark.parametrize("name", ROWS)
def test_cached_answers_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    """Of encast's engine, in parts, against torch's own for a padded batch."""
    task = task_of(name)
    labels = {str(index): label for index, label in task.head().get("id2label", {}).items()}
    config = {"id2label": labels} if labels else {}
    source = make_checkpoint(tmp_path / "bert", "bert", name, layers=2, hidden=32, heads=2, config=config)
    generator = np.random.default_rng(0)
    examples = [
        Example((generator.integers(5, 200, n).astype(np.int32),), (np.zeros(n, np.int32),), None)
        for n in generator.integers(3, 40, 1100)
    ]
    artifact = encast.compile(source, tmp_path / "t.encast", dtype="f32")
    with encast.load(artifact, threads=1) as engine:
        seen: list[int] = []
        cache_answers(tmp_path / "cache", engine, examples, task, lambda done, total: seen.append(done))
        assert seen == [1024, 1100]
        written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
        # What is there is not computed again.
        cache_answers(tmp_path / "cache", engine, examples, task, lambda done, total: None)
        assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    rows = [3, 1050, 7]
    length = max(examples[row].tokens for row in rows)
    ids, mask = torch.zeros(3, length, dtype=torch.long), torch.zeros(3, length, dtype=torch.bool)
    for index, row in enumerate(rows):
        own = examples[row].ids[0]
        ids[index, : len(own)], mask[index, : len(own)] = torch.from_numpy(own.astype(np.int64)), True
    cached = CachedTeacher(tmp_path / "cache", examples, task)(rows, ids, torch.zeros_like(ids), mask)
    file = tmp_path / "cache" / "answers-000001024.npy"
    content = bytearray(file.read_bytes())
    content[200] ^= 1  # of a number
    file.write_bytes(content)
    with pytest.raises(ResourceError, match=r"answers-000001024\.npy is damaged .*; remove it"):
        CachedTeacher(tmp_path / "cache", examples, task)
    model = load_model(open_checkpoint(source), task, seed=0)
    online = OnlineTeacher(model)(rows, ids, torch.zeros_like(ids), mask)
    valid = mask if name != "classify" else torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(cached.answers[valid], online.answers[valid], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arch", "layer"), [("bert", "encoder.layer.{}.output.dense.weight"), ("modernbert", "layers.{}.mlp.Wo.weight")]
)
def test_dropped_layers_keep_the_others_bits(
    tmp_path: Path, write_rows: Callable[..., Path], arch: str, layer: str
) -> None:
    source = make_checkpoint(tmp_path / arch, arch, "features", layers=4, hidden=32, heads=2)
    data = write_rows("data", classes(40, 1), classes(20, 2))
    recipe = parse_recipe(
        "stages: [{fine-tune: {epochs: 0}}, {distil: {teacher: fine-tune, layers: [0, 1, 3], epochs: 0}},"
        " {distil: {name: again, teacher: fine-tune, layers: 2, epochs: 0}}, quantise]",
        "here",
    )
    train, dev = open_dataset(data, split="train"), open_dataset(data)
    result = compress(source, tmp_path / "out", task="classify", recipe=recipe, train=train, dev=dev, device="cpu")
    before, small = open_checkpoint(source), open_checkpoint(result.checkpoint)
    own = {name.removeprefix("bert.").removeprefix("model."): name for name in small.tensors}
    for new, old in ((0, 0), (1, 3)):
        np.testing.assert_array_equal(small.tensors.f32(own[layer.format(new)]), before.tensors.f32(layer.format(old)))
    assert layer.format(2) not in own
    if arch == "modernbert":  # whose layers reach as far as before: every third one over the whole text
        assert small.config["layer_types"] == ["full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("distil: {teacher: nowhere}", "the folder of a checkpoint is needed"),
        ("distil: {name: d, teacher: d}", "no stage before it"),
        ("distil: {teacher: fine-tune, layers: [1, 9]}", "has 2, numbered from 0"),
        ("prune: {sparsity: 0.5, keep: ['*.nothing']}", "matches none"),
        ("prune: {sparsity: 0.5, keep: ['*']}", r"stage prune: keep is \*, which leaves no weight to prune"),
        ("quantise: {metric: bleu}", "bleu"),
    ],
)
def test_what_a_stage_refuses_before_anything_runs(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], stage: str, said: str
) -> None:
    data = write_rows("data", classes(40, 1), classes(20, 2))
    train = open_dataset(data, split="train")

    def start() -> None:
        recipe = parse_recipe(f"stages: [{{fine-tune: {{epochs: 0}}}}, {{{stage}}}]", "here")
        compress(encoder, tmp_path / "out", task="classify", recipe=recipe, train=train, device="cpu")

    with pytest.raises(InputError, match=said):
        start()
    assert not (tmp_path / "out").exists()


def checked(source: Path, task: str, train: Dataset, stages: str, metric: str | None = None) -> None:
    """What is done before anything runs."""
    recipe = parse_recipe(f"stages: [{stages}]", "here")
    prepare(open_checkpoint(source), recipe, task, train, None, None, metric, 0, 1, "cpu", None)


@pytest.mark.parametrize(
    ("arch", "layers", "said"),
    [
        ("albert", 2, r"has no weights called layer\.0, .* its 4 layers"),
        ("modernbert", [1, 3], r"layer 1 of .* cannot be its layer 0, .* has attn_norm\.weight: keep layer 0"),
        ("modernbert", 5, r"layers is 5; .* has 4, numbered from 0"),
        ("gte", [0, 4], r"layers is \[0, 4\]; .* has 4, numbered from 0"),
    ],
)
def test_layers_that_cannot_be_left_out_are_told_before_anything_runs(
    tmp_path: Path, arch: str, layers: list[int] | int, said: str
) -> None:
    source = make_checkpoint(tmp_path / arch, arch, "features", layers=4, hidden=32, heads=2)
    with pytest.raises(InputError, match=f"stage distil: .*{said}"):
        checked(
            source,
            "classify",
            Dataset("here", *ROWS["classify"]),
            f"fine-tune, {{distil: {{teacher: fine-tune, layers: {layers}}}}}",
        )


def test_layers_of_a_second_stage_are_those_that_the_first_left(encoder: Path) -> None:
    kept = [
        f"{{distil: {{name: d{number}, teacher: fine-tune, layers: {which}}}}}" for number, which in ((1, 1), (2, [1]))
    ]
    with pytest.raises(InputError, match=r"stage d2: layers is \[1\]; the model has 1, numbered from 0"):
        checked(encoder, "classify", Dataset("here", *ROWS["classify"]), f"fine-tune, {', '.join(kept)}")


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ("'*layer.1.*'", r"the pattern '\*layer\.1\.\*' in keep matches weights of layers alone that .* leaves out"),
        ("'*layer.0.*'", r"keep is \*layer\.0\.\*, which leaves no weight to prune"),
        ("'*layer.0.output*'", None),
    ],
)
def test_what_stays_dense_is_of_the_layers_that_are_left(encoder: Path, keep: str, said: str | None) -> None:
    with nullcontext() if said is None else pytest.raises(InputError, match=f"stage prune: {said}"):
        checked(
            encoder,
            "classify",
            Dataset("here", *ROWS["classify"]),
            f"fine-tune, {{distil: {{teacher: fine-tune, layers: 1}}}}, {{prune: {{sparsity: 0.5, keep: [{keep}]}}}}",
        )


@pytest.mark.parametrize(("classes", "refused"), [(2, False), (3, True)])
def test_f1_is_of_two_classes(encoder: Path, classes: int, refused: bool) -> None:
    train = Dataset("here", "classes", [Labelled("the", str(index % classes)) for index in range(12)])

    for stages, metric in (("fine-tune, {quantise: {metric: f1}}", None), ("fine-tune", "f1")):
        said = r"not two classes, as in here it is one of accuracy, f1_macro, mcc"
        with pytest.raises(InputError, match=said) if refused else nullcontext():
            checked(encoder, "classify", train, stages, metric)


@pytest.mark.parametrize(
    ("stride", "question", "said"),
    [
        (35, "the of", "the stage prune: stride is 35; a window holds 35 tokens"),
        (34, "the of", None),
        (19, "the of " * 50, "the stage prune: stride is 19; a window holds 19 tokens"),
        (18, "the of " * 50, None),
    ],
)
def test_a_stride_fits_the_windows_of_every_stage(encoder: Path, stride: int, question: str, said: str | None) -> None:
    """Windows of 40 tokens: three are special, the question takes up to half of the rest."""
    rows = [Question("1", "in", "of and", ("and",), (3,)), Question("2", question, "of and", ("and",), (3,))]
    train = Dataset("here", "answers", rows)
    later = f"{{prune: {{sparsity: 0.5, max-length: 40, stride: {stride}}}}}"
    with pytest.raises(InputError, match=said) if said else nullcontext():
        checked(encoder, "answer", train, f"fine-tune, {later}")


LABELS = {"id2label": {"0": "early", "1": "late"}}


def _other_classes(folder: Path) -> Path:
    return make_checkpoint(folder, "bert", "classify", layers=1, hidden=32, heads=2, labels=2)


def _other_tokenizer(folder: Path) -> Path:
    return make_checkpoint(folder, "roberta", "classify", layers=1, hidden=32, heads=2, labels=2, config=LABELS)


def _no_head(folder: Path) -> Path:
    return make_checkpoint(folder, "bert", "features", layers=1, hidden=32, heads=2)


def _gluon(folder: Path) -> Path:
    return write_gluon(_other_classes(folder.with_name("source")), folder, "bert", "classify")


@pytest.mark.parametrize("cache", ["true", "false"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_other_classes, "knows the classes"),
        (_other_tokenizer, "another tokenizer"),
        (_no_head, "classif"),
        (_gluon, "teaching needs a folder in the Hugging Face layout"),
    ],
)
def test_teachers_that_teach_nothing(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], make: Callable[[Path], Path], said: str, cache: str
) -> None:
    teacher = make(tmp_path / "teacher")
    data = write_rows("data", classes(40, 1), classes(20, 2))
    recipe = parse_recipe(f"stages: [{{distil: {{teacher: {teacher}, epochs: 1, cache: {cache}}}}}]", "here")
    train = open_dataset(data, split="train")
    with pytest.raises(EncastError, match=said):
        compress(encoder, tmp_path / "out", task="classify", recipe=recipe, train=train, device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("teacher", "terms", "said"),
    [
        ({"hidden": 64}, "hidden: 1", "states are 32 wide, those of the teacher .* 64"),
        ({"hidden": 64}, "attention: 1", None),
        ({"heads": 4}, "attention: 1", "the model has 2 heads, the teacher .* 4; give"),
        ({"heads": 4}, "hidden: 1", None),
        (
            {"layers": 1},
            "hidden: 1, attention: 1",
            "hidden and attention: the model has 2 layers, the teacher .* 1; give",
        ),
        ({"layers": 1}, "hidden: 1, layers: 1", None),
        ({"layers": 1}, "soft: 1", None),
        ({"positions": 16}, "soft: 1", "reads 16 tokens at most, and a row has 22; give max-length 16"),
        ({"positions": 16}, "hidden: 1, max-length: 16", None),
        ({"positions": 22}, "soft: 1", None),
    ],
)
def test_a_teacher_has_what_is_compared(
    tmp_path: Path, encoder: Path, teacher: dict[str, int], terms: str, said: str | None
) -> None:
    """Told before a stage has trained."""
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "labels": 2, **teacher}
    made = make_checkpoint(tmp_path / "teacher", "bert", "classify", config=LABELS, **sizes)  # type: ignore[arg-type]
    train = Dataset("here", "classes", [Labelled("the " * 20, "early"), Labelled("of", "late")])
    with pytest.raises(InputError, match=f"the stage distil: .*{said}") if said else nullcontext():
        checked(encoder, "classify", train, f"fine-tune, {{distil: {{teacher: {made}, {terms}}}}}")


def test_a_model_learns_nothing_of_itself(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    """In training, where dropout would tell the two apart."""
    source = make_checkpoint(
        tmp_path / "bert", "bert", "classify", layers=2, hidden=32, heads=2, labels=2,
        config={**LABELS, "attention_probs_dropout_prob": 0.5},
    )  # fmt: skip
    data = write_rows("data", classes(16, 1), classes(8, 2))
    # f32 is named: the teacher runs in f32.
    stage = "soft: 1, hidden: 1, attention: 1, dropout: 0, epochs: 1, learning-rate: 1.0e-9, precision: f32"
    recipe = parse_recipe(f"stages: [{{distil: {{teacher: {source}, {stage}}}}}]", "here")
    train, dev = open_dataset(data, split="train"), open_dataset(data)
    result = compress(source, tmp_path / "out", task="classify", recipe=recipe, train=train, dev=dev, device="cpu")
    assert result.stages["distil"]["history"][0]["loss"] == pytest.approx(0.0, abs=1e-5)
    # What the stage changed for itself is not in its checkpoint.
    assert open_checkpoint(result.checkpoint).config["attention_probs_dropout_prob"] == 0.5


def test_a_student_that_diverges(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    data = write_rows("data", classes(64, 1), classes(20, 2))
    recipe = parse_recipe(
        "stages: [{fine-tune: {epochs: 0}}, "
        "{distil: {teacher: fine-tune, epochs: 20, learning-rate: 1.0e+30, warmup: 0, clip: 0}}]",
        "here",
    )
    train = open_dataset(data, split="train")
    with pytest.raises(InputError, match="diverged; lower learning-rate"):
        compress(encoder, tmp_path / "out", task="classify", recipe=recipe, train=train, device="cpu")
    assert not (tmp_path / "out" / "2-distil").exists()


TERMS = [
    "hard: 1, soft: 0",
    "soft: 1",
    "soft: 0, hidden: 1",
    "soft: 0, attention: 1",
    "hard: 2, hidden: 0.5, attention: 1",
]


@pytest.mark.parametrize("name", ["tag", "classify"])
def test_parts_of_a_batch_have_the_loss_of_the_whole(tmp_path: Path, encoder: Path, name: str) -> None:
    """Rows of unlike lengths: the losses are means over rows, labels, or tokens."""
    lengths = (1, 1, 2, 20, 20, 20)
    rows: list[Any] = [
        Sentence(("the",) * n, ("B-x", *["O"] * (n - 1))) if name == "tag" else Labelled("the " * n, "ab"[n % 2])
        for n in lengths
    ]
    checkpoint, data = open_checkpoint(encoder), Dataset("here", ROWS[name][0], rows)
    task = find_task(name, data)(data, 48, None)
    examples = list(task.examples(rows, open_tokenizer(checkpoint, 48)))
    model, other = (load_model(checkpoint, task, seed=seed, dropout=0.0, attention=True) for seed in (0, 3))
    teacher = OnlineTeacher(other, hidden=True, attention=True)

    def loss(terms: str, accumulate: int) -> float:
        stage = f"distil: {{teacher: t, batch-size: 6, accumulate: {accumulate}, precision: f32, {terms}}}"
        (training,) = parse_recipe(f"stages: [{{{stage}}}]", "here").stages
        assert isinstance(training, Distil)
        trainer = Trainer(
            model, training, examples, products=[], state=StateFolder(tmp_path), seed=0, teacher=teacher
        )  # fmt: skip
        return trainer._backward(np.arange(6))

    for terms in TERMS:
        whole = loss(terms, 1)
        assert [loss(terms, parts) for parts in (2, 6)] == pytest.approx([whole] * 2, rel=1e-4, abs=1e-6), terms


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("pattern", ["encoder.layer.0.*", "bert.encoder.layer.0.*"])
def test_keep_names_weights_with_and_without_the_prefix(
    tmp_path: Path, encoder: Path, pattern: str, prefixed: bool
) -> None:
    """A checkpoint without a head has none, and the model that is trained has one."""
    train = Dataset("here", *ROWS["classify"])
    source = encoder
    if prefixed:
        source = make_checkpoint(tmp_path / "bert", "bert", "classify", layers=2, hidden=32, heads=2, labels=3)
    stage = f"{{prune: {{sparsity: 0.5, epochs: 0, keep: ['{pattern}']}}}}"
    recipe = parse_recipe(f"stages: [{stage}]", "here")
    result = compress(source, tmp_path / "out", task="classify", recipe=recipe, train=train, device="cpu")
    zeros = result.stages["prune"]["zeros"]
    assert {name: share > 0.4 for name, share in zeros.items()} == {name: ".layer.1." in name for name in zeros}


@pytest.mark.parametrize("pattern", ["bogus.*", "layer.*", "bert.encoder.layer.7.*"])
def test_keep_does_not_take_any_word_for_a_prefix(encoder: Path, pattern: str) -> None:
    stage = f"{{prune: {{sparsity: 0.5, keep: ['{pattern}']}}}}"
    with pytest.raises(InputError, match="matches none of the 12 weights"):
        checked(encoder, "classify", Dataset("here", *ROWS["classify"]), stage)
