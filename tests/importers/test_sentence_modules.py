"""modules.json of sentence-transformers: both layouts, every mode, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import safetensors_bytes, torch_zip, write_model, write_modules

from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import SentenceModules, open_checkpoint
from encast.importers.sentence_modules import SpladePooling
from encast.ir.ops import POOLING_MODES

OLD = "sentence_transformers.models."
NEW_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
NEW_POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
NEW_DENSE = "sentence_transformers.base.modules.dense.Dense"
NEW_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
MEAN = {"word_embedding_dimension": 3, "pooling_mode_mean_tokens": True}


def modules_of(folder: Path, modules: list[tuple[str, str]], configs: dict[str, Any]) -> SentenceModules:
    write_model(folder)
    write_modules(folder, modules, configs)
    found = open_checkpoint(folder).modules
    assert found is not None
    return found


def with_pooling(folder: Path, config: dict[str, Any]) -> SentenceModules:
    return modules_of(folder, [(OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling")], {"1_Pooling": config})


@pytest.mark.parametrize(
    ("flag", "mode"),
    [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        ("pooling_mode_weightedmean_tokens", "weightedmean"),
        ("pooling_mode_lasttoken", "lasttoken"),
    ],
)
def test_one_flag_a_mode(tmp_path: Path, flag: str, mode: str) -> None:
    config = {"word_embedding_dimension": 3, "pooling_mode_mean_tokens": False, "include_prompt": True, flag: True}
    assert with_pooling(tmp_path, config).pooling_modes == (mode,)


def test_several_flags_stand_in_the_order_of_concatenation(tmp_path: Path) -> None:
    config = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}
    assert with_pooling(tmp_path, config).pooling_modes == ("cls", "mean", "lasttoken")


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_new_layout(tmp_path: Path, mode: str) -> None:
    modules = modules_of(
        tmp_path,
        [(NEW_TRANSFORMER, ""), (NEW_POOLING, "1_Pooling"), (NEW_NORMALIZE, "2_Normalize")],
        {
            "1_Pooling": {"embedding_dimension": 3, "pooling_mode": mode, "include_prompt": True},
            "2_Normalize": {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"},
        },
    )
    assert modules.pooling_modes == (mode,)
    assert modules.normalize


def test_new_layout_keeps_the_configs_order_of_modes(tmp_path: Path) -> None:
    config = {"embedding_dimension": 3, "pooling_mode": ["lasttoken", "cls"]}
    assert with_pooling(tmp_path, config).pooling_modes == ("lasttoken", "cls")


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": None}, ("cls",)),
        ({"pooling_mode": "cls"}, ("cls",)),
    ],
)
def test_modes_on_which_versions_agree(tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert with_pooling(tmp_path, config).pooling_modes == modes


def test_no_flags_means_mean(tmp_path: Path) -> None:
    assert with_pooling(tmp_path, {"word_embedding_dimension": 3}).pooling_modes == ("mean",)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**MEAN, "include_prompt": False}, UnsupportedModelError, "include_prompt is false"),
        ({**MEAN, "pooling_mode_attention": True}, UnsupportedModelError, "'pooling_mode_attention' is not understood"),
        ({"pooling_mode": "median"}, UnsupportedModelError, "pooling_mode is 'median'"),
        ({"pooling_mode": ["cls", 3]}, UnsupportedModelError, "pooling_mode is a value of type int"),
        ({"pooling_mode": []}, CheckpointError, "at least one"),
        ({"pooling_mode": ["cls", "cls"]}, CheckpointError, "at most once"),
        ({"pooling_mode_mean_tokens": False}, CheckpointError, "at least one"),
        ({"pooling_mode_cls_token": True}, UnsupportedModelError, "cls is on and pooling_mode_mean_tokens is absent"),
        ({"pooling_mode_mean_tokens": "yes"}, CheckpointError, "pooling_mode_mean_tokens must be true or false"),
        ([], CheckpointError, "a JSON object is needed"),
    ],
)
def test_pooling_errors(tmp_path: Path, config: Any, error: type[EncastError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        with_pooling(tmp_path, config)
    assert "1_Pooling" in str(caught.value)


# Dense

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([7, 8], np.float32)
DENSE = {"in_features": 3, "out_features": 2, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def with_dense(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Any] | None = None,
    *,
    kind: str = OLD + "Dense",
    torch: bool = False,
) -> SentenceModules:
    arrays = {"linear.weight": WEIGHT, "linear.bias": BIAS} if tensors is None else tensors
    (folder / "2_Dense").mkdir()
    if torch:
        (folder / "2_Dense" / "pytorch_model.bin").write_bytes(torch_zip(arrays))
    else:
        (folder / "2_Dense" / "model.safetensors").write_bytes(safetensors_bytes(arrays))
    return modules_of(
        folder,
        [
            (OLD + "Transformer", ""),
            (OLD + "Pooling", "1_Pooling"),
            (kind, "2_Dense"),
            (OLD + "Normalize", "3_Normalize"),
        ],
        {"1_Pooling": MEAN, "2_Dense": config},
    )


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("kind", [OLD + "Dense", NEW_DENSE])
def test_dense(tmp_path: Path, torch: bool, kind: str) -> None:
    (dense,) = with_dense(tmp_path, DENSE, kind=kind, torch=torch).dense
    np.testing.assert_array_equal(dense.weight, WEIGHT)
    assert dense.bias is not None
    np.testing.assert_array_equal(dense.bias, BIAS)
    assert dense.activation == "tanh"


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("torch.nn.modules.linear.Identity", "none"),
        ("torch.nn.modules.activation.GELU", "gelu"),
        ("torch.nn.modules.activation.ReLU", "relu"),
        ("torch.nn.modules.activation.SiLU", "silu"),
    ],
)
def test_dense_activations(tmp_path: Path, name: str, activation: str) -> None:
    config = {**DENSE, "activation_function": name, "module_input_name": "sentence_embedding", "use_residual": False}
    assert with_dense(tmp_path, config).dense[0].activation == activation


def test_dense_without_bias(tmp_path: Path) -> None:
    modules = with_dense(tmp_path, {**DENSE, "bias": False}, {"linear.weight": WEIGHT})
    assert modules.dense[0].bias is None
    assert modules.normalize


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({**DENSE, "activation_function": "torch.nn.modules.activation.Mish"}, None, "activation_function is '.*Mish'"),
        ({**DENSE, "activation_function": "os.system"}, None, r"activation_function is 'os\.system'"),
        ({**DENSE, "use_residual": True}, None, "'use_residual' is not understood"),
        ({**DENSE, "module_input_name": "token_embeddings"}, None, "module_input_name is 'token_embeddings'"),
        ({**DENSE, "out_features": 4}, None, r"shape \[2, 3\], out_features and in_features say \[4, 3\]"),
        (DENSE, {"linear.weight": WEIGHT}, "'linear.bias'"),
        ({**DENSE, "bias": False}, None, "'linear.bias' is none of linear.weight"),
        (DENSE, {"linear.weight": WEIGHT, "linear.bias": np.ones(3, np.float32)}, r"linear.bias has shape \[3\]"),
        (DENSE, {"linear.weight": WEIGHT * np.nan, "linear.bias": BIAS}, r"holds nan at index \[0, 0\]"),
    ],
)
def test_dense_errors(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(EncastError, match=message) as caught:
        with_dense(tmp_path, config, tensors)
    assert "2_Dense" in str(caught.value)


# modules.json itself


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            [(OLD + "Transformer", ""), (OLD + "CNN", "1_CNN")],
            r"module 1 has type 'sentence_transformers\.models\.CNN'",
        ),
        ([(OLD + "Transformer", ""), (OLD + "WordWeights", "1_W"), (OLD + "Pooling", "2")], "WordWeights"),
        (
            [("custom_st.Encoder", ""), (OLD + "Pooling", "1_Pooling")],
            r"module 0 has type 'custom_st\.Encoder'",
        ),
        ([(OLD + "Transformer", ""), ("pylate.models.Gate.Gate", "1_Dense")], "'pylate.models.Gate.Gate'"),
        ([(OLD + "Pooling", "1_Pooling")], "the first module must be a Transformer"),
        ([(OLD + "Transformer", "")], "a Pooling module must follow the Transformer"),
        ([(OLD + "Transformer", ""), (OLD + "Normalize", "1")], "a Pooling module must follow"),
        (
            [(OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling"), (OLD + "Pooling", "1_Pooling")],
            "a second Pooling",
        ),
        (
            [(OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling"), (OLD + "Normalize", "2"), (OLD + "Dense", "3")],
            "a Dense module after Normalize",
        ),
        ([], "no modules"),
        ([(OLD + "Transformer", "../elsewhere"), (OLD + "Pooling", "1_Pooling")], "does not stay inside"),
        ([(OLD + "Transformer", ""), (OLD + "Pooling", "/etc")], "does not stay inside"),
        ([(OLD + "Transformer", ""), (OLD + "Pooling", "absent")], "cannot be read"),
    ],
)
def test_module_errors(tmp_path: Path, modules: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(EncastError, match=message):
        modules_of(tmp_path, modules, {"1_Pooling": MEAN})


def test_dropout_is_nothing_at_inference(tmp_path: Path) -> None:
    modules = [(OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling"), (OLD + "Dropout", "2_Dropout")]
    assert modules_of(tmp_path, modules, {"1_Pooling": MEAN}) == SentenceModules(("mean",))


def test_normalize_of_tokens_is_refused(tmp_path: Path) -> None:
    modules = [(OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling"), (NEW_NORMALIZE, "2_Normalize")]
    with pytest.raises(UnsupportedModelError, match="module_input_name is 'token_embeddings'"):
        modules_of(tmp_path, modules, {"1_Pooling": MEAN, "2_Normalize": {"module_input_name": "token_embeddings"}})


def test_module_kwargs_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    entries = [{"type": OLD + "Transformer", "path": "", "kwargs": ["task"]}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedModelError, match="kwargs"):
        open_checkpoint(tmp_path)


def test_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "0_Transformer")
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    modules = [(OLD + "Transformer", "0_Transformer"), (OLD + "Pooling", "1_Pooling")]
    write_modules(tmp_path, modules, {"1_Pooling": MEAN})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path / "0_Transformer"
    assert "weight" in checkpoint.tensors
    assert checkpoint.tokenizer.max_length == 64
    assert "0_Transformer/model.safetensors" in checkpoint.provenance["files"]


# sentence_bert_config.json and config_sentence_transformers.json


def test_settings(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128, "do_lower_case": true}')
    config = {
        "prompts": {"query": "query: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    modules = with_pooling(tmp_path, MEAN)
    assert (modules.max_seq_length, modules.do_lower_case) == (128, True)
    assert modules.prompts == {"query": "query: ", "document": ""}
    assert (modules.default_prompt_name, modules.similarity) == ("query", "dot")


def test_settings_of_version_5_4(tmp_path: Path) -> None:
    config = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    assert with_pooling(tmp_path, MEAN).max_seq_length is None


def test_settings_that_change_no_number(tmp_path: Path) -> None:
    config = {
        "max_seq_length": 128,
        "model_args": {"trust_remote_code": True, "attn_implementation": "sdpa", "torch_dtype": "float32"},
        "config_args": {"revision": "main", "use_memory_efficient_attention": False, "unpad_inputs": True},
        "tokenizer_args": {"trust_remote_code": True, "model_max_length": 128},
        "model_kwargs": {"add_pooling_layer": False, "dtype": "bfloat16"},
        "config_kwargs": {},
        "processor_kwargs": None,
        "processing_kwargs": {},
        "cache_dir": None,
        "unpad_inputs": True,
        "mask_prompt": False,
    }
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    assert with_pooling(tmp_path, MEAN).max_seq_length == 128


def test_cross_encoders_have_no_sentence_modules(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    }
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    write_modules(tmp_path, [(NEW_TRANSFORMER, "")], {})
    assert open_checkpoint(tmp_path).modules is None


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be a positive integer"),
        ("sentence_bert_config.json", {"max_seq_length": True}, "max_seq_length must be a positive integer"),
        ("sentence_bert_config.json", {"do_lower_case": 1}, "do_lower_case must be true or false"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion is set"),
        ("sentence_bert_config.json", {"transformer_task": "any-to-any"}, "transformer_task is 'any-to-any'"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 3}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"model_args": {"num_hidden_layers": 1}}, "model_args sets 'num_hidden_layers'"),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "config_args sets 'hidden_act'"),
        (
            "sentence_bert_config.json",
            {"tokenizer_args": {"do_lower_case": False}},
            "tokenizer_args sets 'do_lower_case'",
        ),
        (
            "sentence_bert_config.json",
            {"tokenizer_args": {"model_max_length": 8}},
            "tokenizer_args sets 'model_max_length'",
        ),
        (
            "sentence_bert_config.json",
            {"tokenizer_args": {"model_max_length": None}},
            "tokenizer_args sets 'model_max_length'",
        ),
        (
            "sentence_bert_config.json",
            {"processor_kwargs": {"use_fast": True, "strip_accents": True}},
            "processor_kwargs sets 'strip_accents'",
        ),
        ("sentence_bert_config.json", {"model_kwargs": {"variant": "x"}}, "model_kwargs sets 'variant'"),
        ("sentence_bert_config.json", {"config_kwargs": ["x"]}, "config_kwargs must be an object or null"),
        ("sentence_bert_config.json", {"mask_prompt": True}, "'mask_prompt' is not understood"),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "x"}, "'tokenizer_name_or_path' is not understood"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "get_text_features"}}},
            "modality_config",
        ),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "prompts must be"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name is 'q'"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "jaccard"}, "similarity_fn_name is 'jaccard'"),
        ("config_sentence_transformers.json", {"truncate_dim": 2}, "remove the field, and give truncate_dim where"),
    ],
)
def test_settings_errors(tmp_path: Path, name: str, config: dict[str, Any], message: str) -> None:
    (tmp_path / name).write_text(json.dumps(config))
    with pytest.raises(EncastError, match=message):
        with_pooling(tmp_path, MEAN)


OLD_MLM = "sentence_transformers.sparse_encoder.models.MLMTransformer"
OLD_SPLADE = "sentence_transformers.sparse_encoder.models.SpladePooling"
NEW_SPLADE = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
FILL_MASK = {
    "transformer_task": "fill-mask",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
}


@pytest.mark.parametrize(
    ("kinds", "settings"),
    [((OLD_MLM, OLD_SPLADE), {"max_seq_length": 7}), ((NEW_TRANSFORMER, NEW_SPLADE), FILL_MASK)],
)
def test_sparse_encoders(tmp_path: Path, kinds: tuple[str, str], settings: dict[str, Any]) -> None:
    write_model(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    write_modules(tmp_path, [(kinds[0], ""), (kinds[1], "1_SpladePooling")], {"1_SpladePooling": {}})
    found = open_checkpoint(tmp_path).modules
    assert found is not None
    assert found.splade == SpladePooling("relu", None)
    assert (found.pooling_modes, found.dense, found.normalize) == ((), (), False)
    config: dict[str, Any] = {"pooling_strategy": "max", "activation_function": "log1p_relu", "chunk_size": 8}
    (tmp_path / "1_SpladePooling" / "config.json").write_text(json.dumps(config))
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"max_active_dims": 64, "prompts": {"query": "q: "}, "default_prompt_name": "query"})
    )
    found = open_checkpoint(tmp_path).modules
    assert found is not None
    assert found.splade == SpladePooling("log1p_relu", 64)
    assert (found.prompts, found.default_prompt_name) == ({"query": "q: "}, "query")
    assert found.max_seq_length == settings.get("max_seq_length")


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ([OLD_MLM, OLD_SPLADE], {"pooling_strategy": "sum"}, "pooling_strategy is 'sum'; supported: max"),
        ([OLD_MLM, OLD_SPLADE], {"activation_function": "gelu"}, "activation_function is 'gelu'.*log1p_relu"),
        ([OLD_MLM, OLD_SPLADE], {"strange": 1}, "'strange' is not understood"),
        ([OLD + "Transformer", OLD_SPLADE], {}, "must follow a Transformer for fill-mask"),
        ([OLD_MLM, OLD_SPLADE, OLD + "Normalize"], {}, "and be the last"),
        ([OLD_MLM, OLD + "Pooling"], {}, "a Pooling module must follow the Transformer"),
        ([OLD_MLM], {}, "a Pooling module must follow the Transformer"),
        ([OLD_MLM, OLD + "Pooling", OLD_SPLADE], {}, "and be the last"),
        (["sentence_transformers.sparse_encoder.models.SparseAutoEncoder"], {}, "SparseAutoEncoder.*supported are"),
    ],
)
def test_other_sparse_encoders_are_refused(
    tmp_path: Path, modules: list[str], config: dict[str, Any], message: str
) -> None:
    write_model(tmp_path)
    paths = ["", *(f"{index}_x" for index in range(1, len(modules)))]
    write_modules(tmp_path, list(zip(modules, paths, strict=True)), dict.fromkeys(paths[1:], config))
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("most", [0, -3, 1.5, True, "9"])
def test_max_active_dims_is_a_positive_number(tmp_path: Path, most: object) -> None:
    write_model(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"max_active_dims": most}))
    write_modules(tmp_path, [(OLD_MLM, ""), (OLD_SPLADE, "1_x")], {"1_x": {}})
    with pytest.raises(CheckpointError, match="max_active_dims must be a positive integer"):
        open_checkpoint(tmp_path)


def test_dense_pooling_of_a_masked_lm_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(FILL_MASK))
    write_modules(tmp_path, [(NEW_TRANSFORMER, ""), (NEW_POOLING, "1_Pooling")], {"1_Pooling": {}})
    with pytest.raises(UnsupportedModelError, match=r"must follow the Transformer for feature-extraction.*fill-mask"):
        open_checkpoint(tmp_path)
