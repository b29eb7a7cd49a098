"""Adapters that lie in a checkpoint: the one that is asked for goes into the weights, its text before every input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import ADAPTERS, INSTRUCTIONS, RANK, make_adapted, merged
from checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file
from xlm_roberta_flash_family import FAMILY

import encast
from encast import artifact
from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.calibrate import calibrate
from encast.cli.main import main
from encast.errors import CheckpointError, EncastError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint

IDS = [7, 30, 12, 45, 9]


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_adapter_is_in_the_weights(name: str, tmp_path: Path) -> None:
    """As the second implementation answers on weights that the test has merged."""
    folder = make_adapted(tmp_path / "made", "features")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert FAMILY.answers is not None
    wanted, _ = FAMILY.answers(merged(tensors, ADAPTERS.index(name)), config, "features", IDS)
    graph = build_graph(open_checkpoint(folder, adapter=name))
    found = Reference(graph).run("last_hidden_state", Batch.of([IDS]))
    np.testing.assert_allclose(found, wanted, atol=5e-6)  # weights are rounded to f32
    other = (ADAPTERS.index(name) + 1) % len(ADAPTERS)
    others, _ = FAMILY.answers(merged(tensors, other), config, "features", IDS)
    assert np.abs(found - others).max() > 0.1


def test_a_weight_is_rounded_once(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made", "features")
    wanted = merged(load_file(folder / "model.safetensors"), 1)
    checkpoint = open_checkpoint(folder, adapter=ADAPTERS[1])
    assert set(checkpoint.tensors) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(checkpoint.tensors.f32(name), array.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_none_leaves_the_weights_as_they_are(dtype: Any, tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made", "features")
    tensors = {name: array.astype(dtype) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder, adapter="none")
    for name in checkpoint.tensors:
        stored = tensors.get(name, tensors.get(f"{name.removesuffix('.weight')}.parametrizations.weight.original"))
        assert stored is not None
        np.testing.assert_array_equal(checkpoint.tensors.f32(name), stored.astype(np.float32))
    assert build_graph(checkpoint).meta.task == "features"


def test_the_text_of_the_adapter_stands_before_every_input(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made")
    paths = {
        name: encast.compile(folder, tmp_path / f"{name}.encast", dtype="f32", adapter=name)
        for name in (*ADAPTERS, "none")
    }
    card = artifact.open(paths["retrieval.query"]).card
    assert (card["default_prompt"], card["prompts"]) == ("retrieval.query", INSTRUCTIONS)
    assert card["source"]["adapter"] == "retrieval.query"
    assert artifact.open(paths["none"]).card["default_prompt"] is None
    with encast.load(paths["retrieval.query"], threads=1) as engine:
        asked, plain = engine.embed(["he is"]), engine.embed(["for the he is"], prompt_name="text-matching")
        np.testing.assert_array_equal(asked, plain)
        assert np.abs(engine.embed(["he is"], prompt_name="text-matching") - asked).max() > 0.01
        with encast.load(paths["retrieval.passage"], threads=1) as other:
            assert np.abs(other.embed(["he is"]) - asked).max() > 0.01


def test_a_text_of_the_config_alone(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made")
    (folder / "config_sentence_transformers.json").unlink()
    modules = open_checkpoint(folder, adapter="retrieval.passage").modules
    assert modules is not None
    assert (modules.default_prompt_name, dict(modules.prompts)) == ("retrieval.passage", INSTRUCTIONS)


def test_a_checkpoint_with_adapters_asks_for_one(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made")
    names = "'retrieval.query', 'retrieval.passage', 'text-matching', or 'none'"
    with pytest.raises(InputError, match=rf"say which with adapter \(`encast compile --adapter`\), {names}"):
        encast.compile(folder, tmp_path / "out.encast")
    with pytest.raises(InputError, match=rf"adapter is 'query'; .*config\.json has {names}"):
        encast.compile(folder, tmp_path / "out.encast", adapter="query")
    assert not (tmp_path / "out.encast").exists()


def _without(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({name: one for name, one in config.items() if one is not ...}))

    return change


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = dict(load_file(folder / "model.safetensors"))
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return changed


def _modules(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        entries = json.loads((folder / "modules.json").read_text())
        entries[0] |= changes
        (folder / "modules.json").write_text(json.dumps(entries))

    return change


def _settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "sentence_bert_config.json").write_text(json.dumps(changes)) and None


FC1 = "roberta.encoder.layers.0.mlp.fc1"
FACTOR = f"{FC1}.parametrizations.weight.0.lora_A"


def _merged_already(tensors: dict[str, Any]) -> None:
    made = merged(tensors, 0)
    tensors.clear()
    tensors.update({name: array.astype(np.float32) for name, array in made.items()})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without(lora_adaptations=[]), UnsupportedModelError, "custom_st.*lora_adaptations alone"),
        (_without(lora_adaptations="all"), CheckpointError, "lora_adaptations is 'all'; a list of names"),
        (_without(lora_adaptations=["a", 1]), CheckpointError, "lora_adaptations is a value of type list"),
        (_without(lora_adaptations=["a", "a"]), CheckpointError, "has a name twice"),
        (_without(lora_adaptations=["retrieval.query", "none"]), CheckpointError, "has a name twice, or 'none'"),
        (_without(lora_adaptations=[ADAPTERS[0]], task_instructions={ADAPTERS[0]: "for the "}), CheckpointError,
         r"lora_A' has shape \[3, .*need \[1, "),
        (_without(lora_rank=RANK + 1), CheckpointError, rf"lora_A' has shape .*lora_rank {RANK + 1} need \[3, "),
        (_without(lora_rank=...), CheckpointError, r"lora_A' has shape .*lora_rank 4 need"),
        (_without(lora_rank=0), CheckpointError, "lora_rank is 0; an integer from 1"),
        (_without(lora_rank=True), CheckpointError, "lora_rank is true"),
        (_without(lora_alpha="1"), CheckpointError, "lora_alpha is '1'; a number"),
        (_without(lora_alpha=float("nan")), CheckpointError, "NaN|nan"),
        (_without(lora_rank=10**400), CheckpointError, "lora_rank is 1000*; an integer from 1"),
        (_without(task_instructions=["for the "]), CheckpointError, "task_instructions must be an object"),
        (_without(task_instructions=...), CheckpointError, "task_instructions must be an object"),
        (_without(task_instructions={**INSTRUCTIONS, "text-matching": 1}), CheckpointError, "task_instructions mu"),
        (_without(task_instructions={"retrieval.query": "for the "}), CheckpointError, "a text for each of lora_adapt"),
        (_without(task_instructions={**INSTRUCTIONS, "retrieval.query": "f: "}), CheckpointError, "make them alike"),
        (_tensors(lambda tensors: tensors.pop(FACTOR)), CheckpointError, "no tensor is named .*lora_A'"),
        (_tensors(lambda tensors: tensors.update({FACTOR: tensors[FACTOR][:, :, :-1].copy()})), CheckpointError,
         r"fc1\.parametrizations\.weight\.0\.lora_A' has shape \[3, 3, 15\]; 3 lora_adaptations of lora_rank 3 need"),
        (_tensors(lambda tensors: tensors.update({f"{FC1}.weight": np.ones((32, 16), "f4")})), CheckpointError,
         "has a weight, and one below parametrizations"),
        (_tensors(lambda tensors: tensors.update({FACTOR: np.full_like(tensors[FACTOR], np.nan)})), CheckpointError,
         "lora_A' holds nan"),
        (_tensors(lambda tensors: tensors.update({f"{FC1}.parametrizations.weight.1.lora_A": tensors[FACTOR]})),
         CheckpointError, r"have no place .*weight\.1\.lora_A"),
        (_tensors(lambda tensors: tensors.update(
            {f"{FC1}.parametrizations.weight.original": np.ones(4, "f4")})), CheckpointError, "has shape .4., not two"),
        (_tensors(_merged_already), CheckpointError, "no tensor ends in 'parametrizations.weight.original'"),
        (_modules(kwargs=["task", "prompt"]), UnsupportedModelError, "kwargs is .*supported: task"),
        (_settings(config_args={"lora_alpha": 4}), UnsupportedModelError, "config_args sets 'lora_alpha'"),
        (_settings(model_args={"default_task": "separation"}), UnsupportedModelError, "model_args sets 'default_task'"),
        (_modules(type="custom_st.Pooling"), UnsupportedModelError, "has type 'custom_st.Pooling'"),
    ],
)  # fmt: skip
def test_what_is_refused(
    change: Callable[[Path], None], error: type[EncastError], message: str, tmp_path: Path
) -> None:
    folder = make_adapted(tmp_path / "made")
    change(folder)
    with pytest.raises(error, match=message):
        encast.compile(folder, tmp_path / "out.encast", dtype="f32", adapter="retrieval.query")
    assert not (tmp_path / "out.encast").exists()


def test_others_have_none(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made", "features")
    _without(lora_adaptations=...)(folder)
    with pytest.raises(InputError, match=r"config\.json names none \(lora_adaptations.*leave it out; .*PEFT"):
        open_checkpoint(folder, adapter="none")


def test_embeddings_need_the_modules(tmp_path: Path) -> None:
    """Which say how states are pooled, and carry the adapter's text."""
    folder = make_adapted(tmp_path / "made", "features")
    with pytest.raises(
        CheckpointError, match=r"modules\.json is missing, .*goes before each input with adapter 'text-ma"
    ):
        encast.compile(folder, tmp_path / "out.encast", task="embed", adapter="text-matching")
    assert encast.compile(folder, tmp_path / "out.encast", task="embed", adapter="none").exists()


def test_names_of_a_checkpoint_are_bounded_in_messages(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made", "features")
    _without(lora_adaptations=["\x1b[31m" * 99999, *map(str, range(50))])(folder)
    with pytest.raises(InputError, match="and 43 more") as raised:
        open_checkpoint(folder)
    assert len(str(raised.value)) < 2000
    assert "\x1b" not in str(raised.value)


def test_a_sum_beyond_f32_is_named(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made", "features")
    large = {
        name: np.full_like(load_file(folder / "model.safetensors")[name], 1e30) for name in (FACTOR, FACTOR[:-1] + "B")
    }
    _tensors(lambda tensors: tensors.update(large))(folder)
    with pytest.raises(CheckpointError, match=rf"{FC1}.weight' holds -?inf"):
        encast.compile(folder, tmp_path / "out.encast", adapter="text-matching")


def test_the_config_of_jina_embeddings_v3(tmp_path: Path) -> None:
    """All fields but for sizes and the number of adapters."""
    folder, code = make_adapted(tmp_path / "made"), "jinaai/xlm-roberta-flash-implementation--"
    fields = {
        "architectures": ["XLMRobertaModel"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_lora.XLMRobertaLoRA",
            "AutoModelForMaskedLM": f"{code}modeling_xlm_roberta.XLMRobertaForMaskedLM",
            "AutoModelForPreTraining": f"{code}modeling_xlm_roberta.XLMRobertaForPreTraining",
        },
        "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "classifier_dropout": None, "emb_pooler": None,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02,
        "layer_norm_eps": 1e-05, "load_trained_adapters": True, "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False, "matryoshka_dimensions": [32, 64, 128, 256, 512, 768, 1024],
        "max_position_embeddings": 8194, "model_type": "xlm-roberta", "output_past": True, "pad_token_id": 1,
        "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "torch_dtype": "bfloat16",
        "truncate_dim": None, "use_cache": True, "use_flash_attn": True, "use_reentrant": False,
    }  # fmt: skip
    _without(**fields)(folder)
    graph = build_graph(open_checkpoint(folder, adapter="text-matching"))
    assert (graph.meta.task, graph.meta.max_len) == ("embed", 8194)
    assert {node.attrs["theta"] for node in graph.nodes if node.op == "rotary"} == {20000.0}


def test_an_adapter_of_peft_is_not_passed_over(tmp_path: Path) -> None:
    """transformers adds one that lies beside the weights."""
    folder = make_checkpoint(tmp_path / "made", "bert", "features", layers=1, hidden=8, heads=2)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedModelError, match=r"adapter_config\.json: an adapter of PEFT .*merge_and_unload"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json \(it has a PEFT adapter; merge it"):
        open_checkpoint(folder)


def test_calibration_sees_the_adapter(tmp_path: Path) -> None:
    folder = make_adapted(tmp_path / "made")
    seen = [calibrate(folder, ["he is", "of this"], adapter=name) for name in ADAPTERS[:2]]
    name = next(iter(seen[0].values))
    assert (seen[0].values[name].low != seen[1].values[name].low).any()
    quant = encast.QuantSpec(activations="static")
    path = encast.compile(folder, tmp_path / "out.encast", quant=quant, calibration=seen[0], adapter=ADAPTERS[0])
    assert artifact.open(path).card["source"]["adapter"] == ADAPTERS[0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = make_adapted(tmp_path / "made"), tmp_path / "out.encast"
    assert main(["compile", str(folder), "--adapter", "text-matching", "--dtype", "f32", "-o", str(out)]) == 0
    assert main(["inspect", str(out)]) == 0
    assert f"{folder}, adapter text-matching" in capsys.readouterr().out
