"""``encast.compile``, and the verbs compile and inspect, on small checkpoints of two architectures."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import open_case
from checkpoints import make_checkpoint

import encast
from encast import _core, artifact
from encast.cli.main import main
from encast.errors import CheckpointError, InputError, StrictError
from encast.passes import pipeline
from encast.passes.report import Miss, Outcome
from encast.quant import Calibration, QuantSpec

Run = Any


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return open_case("bert-classify", tmp_path_factory).folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def miss_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that finds nothing, which is what a form of attention that nobody foresaw looks like."""

    def fuse(graph: Any, exact: bool) -> Outcome:
        return Outcome(missed=[Miss("attention", 1, "encoder.layer.1.attention", "the scores are doubled")])

    monkeypatch.setattr(pipeline, "fuse_attention", fuse)


class TestCompile:
    def test_default_place_is_the_name_in_the_working_directory(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = encast.compile(checkpoint)
        assert path == tmp_path / f"{checkpoint.name}.encast"
        assert artifact.open(path).card["dtype"] == "int8"
        assert encast.compile(f"{checkpoint}/") == path

    def test_the_card_tells_where_it_comes_from(self, checkpoint: Path, tmp_path: Path) -> None:
        spec = QuantSpec("bf16", keep=(("*.0.*", "f32"),))
        opened = artifact.open(
            encast.compile(checkpoint, tmp_path / "m.encast", dtype="bf16", quant=spec, exact=True, strict=True)
        )
        card = opened.card
        assert card["source"]["source"] == str(checkpoint)
        assert set(card["source"]["files"]) >= {"config.json", "model.safetensors"}
        assert QuantSpec.from_json(card["quant"]) == spec
        assert (card["task"], card["arch"], card["math"], card["dtype"]) == ("classify", "bert", "exact", "bf16")
        assert card["accuracy"] == {}
        assert {"max_length", "truncation_side", "mask_token"} == set(card["tokenizer"])
        assert json.loads(opened.tokenizer_json)["model"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": "int4"}, "one of f32, bf16, int8"),
            ({"calibration": ["a text"]}, "calibration is of type list"),
            ({"calibration": Calibration({}, 1)}, "needs none"),
            ({"calibration": Calibration({}, 1), "quant": QuantSpec(activations="static")}, "has not seen"),
            ({"quant": QuantSpec("bf16")}, "dtype is 'int8' and quant.dtype is 'bf16'"),
            ({"task": "translate"}, "one of features, embed"),
            ({"quant": QuantSpec(keep=(("nothing", "f32"),))}, "'nothing'"),
            ({"out": "nowhere/m.encast"}, "does not exist"),
        ],
    )
    def test_bad_options(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=message):
            encast.compile(checkpoint, **options)
        assert os.listdir(tmp_path) == []

    def test_a_tokenizer_that_is_larger_than_the_embedding(self, checkpoint: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
        with (folder / "vocab.txt").open("a") as file:
            file.write("oneword\ntoomany\n" * 500)
        for name in ("tokenizer.json", "added_tokens.json"):
            (folder / name).unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=r"makes ids up to \d+, the word embedding has \d+ rows"):
            encast.compile(folder, tmp_path / "m.encast")
        assert os.listdir(tmp_path) == ["checkpoint"]

    def test_positions_that_special_tokens_use_up(self, tmp_path: Path) -> None:
        folder = make_checkpoint(tmp_path / "checkpoint", "bert", "features", layers=1, positions=3)
        with pytest.raises(CheckpointError, match=r"may have 3 tokens, and a pair of texts gets 3 special ones"):
            encast.compile(folder, tmp_path / "m.encast")
        assert os.listdir(tmp_path) == ["checkpoint"]

    @pytest.mark.parametrize("out", ["a\0b", "long" * 100])
    def test_names_that_no_folder_can_have(self, checkpoint: Path, tmp_path: Path, out: str) -> None:
        with pytest.raises(InputError, match="cannot hold an artifact"):
            encast.compile(checkpoint, f"{tmp_path}/{out}")
        assert os.listdir(tmp_path) == []

    def test_strict(self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        miss_attention(monkeypatch)
        with pytest.raises(StrictError, match=r"layer 1: attention .*: the scores are doubled"):
            encast.compile(checkpoint, tmp_path / "m.encast", strict=True)
        assert os.listdir(tmp_path) == []
        report = artifact.open(encast.compile(checkpoint, tmp_path / "m.encast")).card["fusions"]
        assert "the scores are doubled" in [miss["reason"] for miss in report["misses"]]

    def test_stages_are_reported_in_order(self, checkpoint: Path, tmp_path: Path) -> None:
        seen: list[str] = []
        encast.compile(checkpoint, tmp_path / "m.encast", progress=lambda stage, done, total: seen.append(stage))
        assert list(dict.fromkeys(seen)) == ["import", "build", "optimise", "store"]

    def test_an_interrupt_leaves_nothing(self, checkpoint: Path, tmp_path: Path) -> None:
        def stop(stage: str, done: int, total: int) -> None:
            if stage == "store":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            encast.compile(checkpoint, tmp_path / "m.encast", progress=stop)
        assert os.listdir(tmp_path) == []


class TestVerbs:
    def test_compile_says_what_it_did(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        code, out, _ = run("compile", checkpoint, "--out", tmp_path / "m.encast", "--keep", "*.0.*=bf16", "--strict")
        assert code == 0
        assert f"{tmp_path / 'm.encast'}:" in out
        assert "layer    qkv  attention  linear_activation  add_layer_norm  embed_layer_norm  products" in out
        rows = {line.split()[0]: line for line in out.splitlines() if line[:1].isdigit()}
        assert "1/1  1/1        1/1                2/2             -                 4 bf16" in rows["0"]
        assert rows["1"].endswith("4 int8, 1 int8 attention")

    def test_compile_json(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        code, out, err = run("compile", checkpoint, "-o", tmp_path / "m.encast", "--dtype", "f32", "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["card"]["dtype"] == "f32"

    def test_a_quant_file(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "q.json").write_text('{"zero_point": "never"}')
        code, out, _ = run("compile", checkpoint, "-o", tmp_path / "m.encast", "--quant", tmp_path / "q.json")
        assert code == 0
        assert "symmetric" in out

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("texts.txt", "the cat\na dog runs\n"),
            ("texts.jsonl", '{"text": "the cat"}\n{"text": "a dog", "pair": "runs over"}\n'),
            ("dev.tsv", "sentence1\tsentence2\tlabel\nthe cat\ta dog\t1\n"),
            ("words.conll", "the O\ncat O\n\na O\ndog O\n"),
            ("pairs.jsonl", '{"anchor": "the cat", "positive": "a dog"}\n'),
            ("answers.jsonl", '{"question": "the cat", "context": "a dog", "answers": ["dog"]}\n'),
        ],
    )
    def test_calibration(self, run: Run, checkpoint: Path, tmp_path: Path, name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        code, out, _ = run("compile", checkpoint, "-o", tmp_path / "m.encast", "--calibrate", tmp_path / name)
        assert code == 0
        assert "activations fixed scales (percentile), with zero points" in out
        assert "quantize(" not in str(artifact.open(tmp_path / "m.encast").graph)

    def test_calibration_for_moved_outliers_alone(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "q.json").write_text('{"move_outliers": 0.5}')
        (tmp_path / "texts.txt").write_text("the cat\na dog runs\n")
        options = ["-o", tmp_path / "m.encast", "--quant", tmp_path / "q.json"]
        code, out, _ = run("compile", checkpoint, *options, "--calibrate", tmp_path / "texts.txt")
        assert code == 0
        assert "activations a scale a row, with zero points, outliers moved to weights (0.5)" in out
        code, _, err = run("compile", checkpoint, *options)
        assert code == 2
        assert "add --calibrate FILE" in err

    @pytest.mark.parametrize(
        ("name", "content", "options", "message"),
        [
            ("texts.txt", "", [], "holds no texts"),
            ("texts.txt", None, [], "texts.txt"),
            ("texts.csv", "word\ncat\n", [], "no column 'text'"),
            ("texts.txt", "the cat\n", ["--dtype", "bf16"], "static activations are for int8"),
        ],
    )
    def test_bad_calibration(
        self,
        run: Run,
        checkpoint: Path,
        tmp_path: Path,
        name: str,
        content: str | None,
        options: list[str],
        message: str,
    ) -> None:
        if content is not None:
            (tmp_path / name).write_text(content)
        calibrate = ["--calibrate", tmp_path / name]
        code, _, err = run("compile", checkpoint, "-o", tmp_path / "m.encast", *calibrate, *options)
        assert code == 2
        assert message in err

    @pytest.mark.parametrize("text", ["{", "[]", '{"zero": 1}', '{"dtype": "int3"}', None])
    def test_a_bad_quant_file(self, run: Run, checkpoint: Path, tmp_path: Path, text: str | None) -> None:
        if text is not None:
            (tmp_path / "q.json").write_text(text)
        code, _, err = run("compile", checkpoint, "-o", tmp_path / "m.encast", "--quant", tmp_path / "q.json")
        assert code == 2
        assert err.startswith("encast: error: ")
        assert not (tmp_path / "m.encast").exists()

    @pytest.mark.parametrize("options", [["--dtype", "int4"], ["--keep", "x"], ["--keep", "x=f32"]])
    def test_bad_options(self, run: Run, checkpoint: Path, tmp_path: Path, options: list[str]) -> None:
        code, _, err = run("compile", checkpoint, "-o", tmp_path / "m.encast", *options)
        assert code == 2
        assert "encast: error: " in err

    def test_inspect(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        path = encast.compile(checkpoint, tmp_path / "m.encast")
        other = {"source": "f32", "metrics": {"mcc": 81.5}, "agreement": {"equal_answers": 0.98}}
        measured = {"task": "classify", "rows": 1821, "metrics": {"mcc": 82.25}, "seconds": 3.5, "against": other}
        artifact.update_card(path, accuracy={"SST-2/dev.tsv": measured, "own": {"value": 0.93}, "number": 3})
        code, out, _ = run("inspect", path, "--strict")
        assert code == 0
        for text in (
            "bert, classify: 3 layers",
            "accuracy    SST-2/dev.tsv: classify, 1,821 rows\n"
            "  mcc                    82.250   against   81.500   +0.750\n"
            "  equal_answers        0.980000\n",
            'own: {"value": 0.93}\n',
            "number: 3\n",
            "with zero points; fast math",
            "weights.safetensors",
        ):
            assert text in out
        code, out, _ = run("inspect", path, "--json")
        assert json.loads(out)["meta"]["arch"] == "bert"
        code, out, _ = run("inspect", path, "--graph")
        assert out == str(artifact.open(path).graph)
        code, out, _ = run("inspect", path, "--plan")
        assert out.startswith("encast-plan ")

    def test_inspect_strict_fails_on_a_miss(
        self, run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        miss_attention(monkeypatch)
        path = encast.compile(checkpoint, tmp_path / "m.encast")
        code, out, err = run("inspect", path)
        assert (code, err) == (0, "")
        assert "0/1 MISSED" in out
        assert "the scores are doubled" in out
        code, _, err = run("inspect", path, "--strict")
        assert code == 2
        assert "layer 1: attention" in err

    def test_inspect_finds_damaged_weights(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        path = encast.compile(checkpoint, tmp_path / "m.encast")
        weights = bytearray((path / "weights.safetensors").read_bytes())
        weights[-1] ^= 1
        (path / "weights.safetensors").write_bytes(weights)
        code, _, err = run("inspect", path)
        assert code == 2
        assert "does not match its checksum" in err

    def test_inspect_of_a_foreign_card(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        """Checksums are right, facts are missing."""
        from encast.artifact.card import seal

        path = encast.compile(checkpoint, tmp_path / "m.encast")
        card = json.loads((path / "card.json").read_bytes())
        for fact in ("source", "quant", "sizes", "fusions", "accuracy", "created"):
            (path / "card.json").write_bytes(seal({key: value for key, value in card.items() if key != fact}))
            code, _, err = run("inspect", path)
            assert code == 2, fact
            assert "card" in err

    def test_inspect_says_what_is_left_of_sparse_products(self, checkpoint: Path, run: Run, tmp_path: Path) -> None:
        assert run("prune", checkpoint, "--sparsity", "0.75", "-o", tmp_path / "pruned")[0] == 0
        code, said, _ = run("compile", tmp_path / "pruned", "--sparse", "always", "-o", tmp_path / "a.encast")
        assert code == 0
        # A quarter, and what rounding to groups of four inputs adds.
        shares = [int(share) for share in re.findall(r"4 sparse_int8 \((\d+)% left\)", said)]
        assert len(shares) == artifact.open(tmp_path / "a.encast").graph.meta.layers
        assert all(25 <= share <= 40 for share in shares)
        assert run("inspect", tmp_path / "a.encast")[1].count("sparse_int8") == len(shares)

    def test_inspect_says_of_each_product_what_sparse_would_bring(
        self, checkpoint: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_core, "isa_best", lambda: "avx2")
        assert run("prune", checkpoint, "--sparsity", "0.75", "--keep", "*.1.*", "-o", tmp_path / "pruned")[0] == 0
        code, said, _ = run("compile", tmp_path / "pruned", "--sparse", "auto", "--strict", "-o", tmp_path / "a.encast")
        assert code == 0
        monkeypatch.setattr(_core, "isa_best", lambda: "scalar")  # the card names the level that was decided for
        code, shown, _ = run("inspect", tmp_path / "a.encast")
        assert "expected to be, at avx2\n" in shown
        assert shown.split("zeros: ")[1].splitlines()[:12] == said.split("zeros: ")[1].splitlines()[:12]
        assert re.search(r"^0 +.* 4/4 +4 sparse_int8 .*$", shown, re.M), "sparse products count as fusions"
        row = {line.split()[0]: re.split(r"  +", line) for line in shown.split("zeros: ")[1].splitlines() if line}
        assert row["product"][1:] == ["outputs x inputs", "zero", "left", "is", "16 rows", "1,024 rows"]
        _, shape, zero, left, kind, few, many = row["encoder.layer.0.attention.self.qkv"]
        assert re.fullmatch(r"\d+x\d+", shape)
        assert (zero, kind) == ("75.0%", "sparse")
        assert 25 <= float(left.rstrip("%")) <= 40
        assert all(re.fullmatch(r"[12]\.\d to [23]\.\d", times) for times in (few, many))
        assert row["encoder.layer.1.attention.self.qkv"][2:] == ["0.0%", "100.0%", "dense", "below 1.5", "below 1.4"]
        products = json.loads(run("inspect", tmp_path / "a.encast", "--json")[1])["zeros"]
        assert products["isa"] == "avx2"
        assert len(products["products"]) == len(row) - 2, "a row each"
        assert {one["name"] for one in products["products"] if one["sparse"]} == {
            name for name in row if ".0." in name or ".2." in name
        }

    def test_inspect_names_products_that_have_both_forms(
        self, checkpoint: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_core, "isa_best", lambda: "avx512vnni")
        assert run("prune", checkpoint, "--sparsity", "0.5", "--keep", "*.1.*", "-o", tmp_path / "pruned")[0] == 0
        code, said, _ = run("compile", tmp_path / "pruned", "--sparse", "auto", "--strict", "-o", tmp_path / "a.encast")
        assert code == 0
        assert re.search(r"^0 +.* 4/4 +4 int8\+sparse_int8 \(\d\d% left\).*$", said, re.M)
        assert re.search(r"^1 +.* 4 int8, .*$", said, re.M)
        products = json.loads(run("inspect", tmp_path / "a.encast", "--json")[1])["zeros"]["products"]
        assert {(one["layer"] == 1, one["form"], one["sparse"]) for one in products if one["layer"] >= 0} == {
            (False, "both", True),
            (True, "dense", False),
        }

    def test_a_level_that_was_not_measured(
        self, checkpoint: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_core, "isa_best", lambda: "scalar")
        run("prune", checkpoint, "--sparsity", "0.75", "-o", tmp_path / "pruned")
        code, said, _ = run("compile", tmp_path / "pruned", "-o", tmp_path / "a.encast")
        assert code == 0
        assert "at scalar, which was not measured\n" in said
        table = said.split("zeros: ")[1]
        assert "dense" in table, "zeros are shown although nobody asked for sparse products"
        assert " rows" not in table

    def test_no_zeros_no_table(self, checkpoint: Path, run: Run, tmp_path: Path) -> None:
        assert "zeros:" not in run("compile", checkpoint, "-o", tmp_path / "a.encast")[1]

    def test_strict_refuses_sparse_products_that_leave_nothing_out(
        self, checkpoint: Path, run: Run, tmp_path: Path
    ) -> None:
        code, _, err = run("compile", checkpoint, "--sparse", "always", "--strict", "-o", tmp_path / "a.encast")
        assert code == 2
        assert "layer 0: sparse at 'encoder.layer.0.attention.self.qkv': no block of four outputs" in err
        assert not (tmp_path / "a.encast").exists()
        assert run("compile", checkpoint, "--sparse", "always", "-o", tmp_path / "a.encast")[0] == 0
        code, shown, err = run("inspect", tmp_path / "a.encast", "--strict")
        assert code == 2
        assert "0/4 MISSED" in shown
        assert "--sparse asks for were not made" in err

    def test_an_artifact_of_before_zeros_were_noted(self, checkpoint: Path, run: Run, tmp_path: Path) -> None:
        from encast.artifact.card import seal

        path = encast.compile(checkpoint, tmp_path / "m.encast", sparse="always")
        card = json.loads((path / "card.json").read_bytes())
        del card["fusions"]["zeros"]
        (path / "card.json").write_bytes(seal(card))
        code, shown, _ = run("inspect", path)
        assert code == 0
        assert "zeros:" not in shown
