"""Keys of other tools: off, without effect, converted and refused ones, and what holds in files of Axolotl only."""

import re
from typing import Any

import pytest

from outsize.base.errors import ConfigError
from outsize.base.records import fields_by_key
from outsize.config.keys import AXOLOTL, TABLE
from outsize.config.read import parse_config
from outsize.config.run import RunConfig

LEAST: dict[str, Any] = {"base_model": "m", "datasets": [{"path": "d", "type": "chat_template"}]}
THEIRS: dict[str, Any] = {**LEAST, "strict": False, "excess_length_strategy": "split"}
"""A file that is taken for Axolotl's, whose notes are those of other keys."""
PAIRS = {"path": "d", "type": "chat_template.default", "field_chosen": "c"}
DPO = {"rl": "dpo", "datasets": [PAIRS], "excess_length_strategy": None}
LORA = {"adapter": "lora", "lora_target_linear": True}
ALONE = dict.fromkeys(LORA)
OFF = (None, False, 0, "", [], {})


def read(change: dict[str, Any], least: dict[str, Any] = LEAST) -> RunConfig:
    return parse_config({**least, **change}, "run.yaml")


def problems_of(change: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(change)
    return str(caught.value).split("\n  ")[1:]


def named(*actions: str) -> list[str]:
    """Keys of the table that are none of ours, patterns as one key that matches them."""
    return [key.replace("*", "x") for key, row in TABLE.items() if row.action in actions and key not in OURS]


OURS = set(fields_by_key(RunConfig))


def test_a_key_of_another_tool_that_is_off_is_ignored_silently() -> None:
    for key in named("converted", "ignored", "refused"):
        for value in OFF:
            assert read({key: value}, THEIRS).notes == (), (key, value)
    assert read({"tensor_parallel_size": 1, "dp_shard_size": 1}, THEIRS).notes == ()


@pytest.mark.parametrize("value", OFF[:2] + OFF[3:])
def test_a_key_that_is_false_or_empty_is_never_refused(value: object) -> None:
    required = {"base_model", "datasets"}
    for key in OURS - required | {"any_key_at_all"}:
        assert read({key: value}), key


def test_keys_without_effect_are_listed_in_one_line() -> None:
    change = {key: "x" for key in named("ignored") if key not in THEIRS}
    (note,) = read(change, THEIRS).notes
    assert note == f"Without effect here: {', '.join(change)} (docs/axolotl.md says why)."


def test_what_cannot_be_done_is_refused_by_name() -> None:
    for key in named("refused"):
        (line,) = problems_of({key: "auto"})
        assert (
            line
            == f"{key}: 'auto' is not supported. {TABLE[key.replace('_x', '_*') if key not in TABLE else key].text}"
        )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"bfloat16": True}, {"bf16": True}),
        ({"bf16": "auto", "torch_dtype": "bfloat16"}, {"bf16": True}),
        ({"bf16": "full"}, {"bf16": True}),
        ({"dtype": "float32"}, {"bf16": False}),
        ({"gpu_memory_limit": 20}, {"gpu_memory": "20GiB"}),
        ({"gpu_memory_limit": "20GiB"}, {"gpu_memory": "20GiB"}),
        ({"saves_per_epoch": 2, "num_epochs": 4}, {"save_steps": 0.125}),
        ({"saves_per_epoch": 1}, {"save_steps": None}),
        ({"evals_per_epoch": 4, "val_set_size": 0.1}, {"eval_steps": 0.25, "evaluates": "steps"}),
        ({"evals_per_epoch": 4, "val_set_size": 0}, {"eval_steps": None, "evaluates": "no"}),
        ({"warmup_steps": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": None}, {"warmup_ratio": 0.1}),
        ({"max_steps": 10, "num_epochs": 3}, {"max_steps": 10, "num_epochs": 3.0}),
        ({"tf32": "auto"}, {"tf32": None}),
        ({"tf32": True}, {"tf32": True}),
        ({"flash_attention": True}, {"attn_implementation": "flash_attention_2"}),
        ({"flash_attention": True, "attn_implementation": "flash_attention_2"}, {"attn_implementation": "flash_attention_2"}),
        ({"sdp_attention": True, "flash_attention": False}, {"attn_implementation": "sdpa"}),
        ({"eager_attention": True}, {"attn_implementation": "eager"}),
        ({"optimizer": "adamw_bnb_8bit"}, {"optimizer": "adamw", "replaced_optimizer": "adamw_bnb_8bit"}),
        ({"optim": "paged_adamw_32bit"}, {"optimizer": "adamw", "replaced_optimizer": "paged_adamw_32bit"}),
        ({"optimizer": "lion_8bit"}, {"optimizer": "lion", "replaced_optimizer": "lion_8bit"}),
        ({"optimizer": "adamw_torch"}, {"optimizer": "adamw", "replaced_optimizer": None}),
        ({"optim_args": {"momentum": 0.9, "nesterov": True}}, {"optim_args": "momentum=0.9,nesterov=True"}),
        ({"adapter": "lora", "lora_target_modules": ["a", "b"]}, {"lora_target_modules": ("a", "b")}),
        ({"adapter": "lora", "lora_target_modules": "q_proj"}, {"lora_target_modules": ("q_proj",)}),
        ({"adapter": "lora", "lora_target_modules": r"layers.[\d]+.(q|k)_proj"}, {"lora_target_modules": r"layers.[\d]+.(q|k)_proj"}),
        ({"adapter": "lora", "lora_target_modules": "all-linear"}, {"lora_target_linear": True, "lora_target_modules": ()}),
        ({"activation_offloading": "legacy"}, {"activation_offloading": "legacy"}),
        ({"activation_offloading": True}, {"activation_offloading": "true"}),
        ({"chat_template": "tokenizer_default"}, {"chat_template": None}),
        ({"chat_template": "llama3"}, {"chat_template": "llama3"}),
        ({"special_tokens": {"pad_token": "<pad>"}}, {"special_tokens": {"pad_token": "<pad>"}}),
        ({"tokens": {"pad_token": "<pad>"}}, {"special_tokens": {"pad_token": "<pad>"}, "tokens": ()}),
        ({"tokens": ["<a>"]}, {"tokens": ("<a>",)}),
        ({"curriculum_sampling": True}, {"train_sampling_strategy": "sequential"}),
        (
            {"wandb_project": "p", "wandb_entity": None, "wandb_name": "n", "report_to": ["tensorboard"]},
            {"report_to": ("wandb", "tensorboard"), "environment": {"WANDB_PROJECT": "p"}, "run_name": "n"},
        ),
        (
            {"mlflow_tracking_uri": "file:x", "mlflow_experiment_name": "e"},
            {"report_to": ("mlflow",), "environment": {"MLFLOW_TRACKING_URI": "file:x", "MLFLOW_EXPERIMENT_NAME": "e"}},
        ),
        ({"use_tensorboard": True}, {"report_to": ("tensorboard",), "environment": {}}),
        (
            {"trackio_project_name": "p", "trackio_run_name": "n"},
            {"report_to": ("trackio",), "environment": {"TRACKIO_PROJECT_NAME": "p"}, "run_name": "n"},
        ),
        ({**DPO, "dpo_beta": 0.3, "precompute_ref_log_probs": False}, {"rl": "dpo", "rl_beta": 0.3}),
        ({**DPO, "trl": {"beta": 0.3}}, {"rl_beta": 0.3}),
        ({**DPO, "rl": "ipo"}, {"rl": "dpo", "dpo_loss_type": ("ipo",)}),
        ({**DPO, "dpo_loss_type": "hinge", "dpo_loss_weights": [1]}, {"dpo_loss_type": ("hinge",), "dpo_loss_weights": (1.0,)}),
        (DPO, {"excess_length_strategy": "drop"}),
        ({**LORA, "adapter": "qlora", "load_in_4bit": True}, {"adapter": "lora", "load_in_4bit": True, "load_in_8bit": False}),
        ({**LORA, "load_in_8bit": True, "load_in_4bit": False}, {"load_in_8bit": True, "load_in_4bit": False}),
        ({**LORA, "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4", "llm_int8_threshold": 6}}, {"bnb_4bit_quant_type": "fp4"}),
        ({**LORA, "load_in_8bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, {"bnb_4bit_quant_type": "nf4"}),
        ({**LORA, "load_in_4bit": True, "bnb_4bit_compute_dtype": "torch.float32"}, {"bnb_4bit_compute_dtype": "float32"}),
    ],
)  # fmt: skip
def test_a_key_with_an_equivalent_is_converted(change: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(change, THEIRS)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.notes == ()


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"fp16": True, "bf16": False}, "fp16: weights and activations are bf16, with exact fp32 master weights"),
        (
            {"adapter": "lora", "lora_target_linear": True, "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            "bnb_4bit_quant_storage: packed weights are stored as uint8; the bytes are the same",
        ),
        ({"attn_implementation": "xformers"}, "attn_implementation: xformers is not used: sdpa computes"),
        (
            {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True},
            "Without effect here: liger_rope",
        ),
        ({"lora_r": 8, "eval_steps": 5, "lora_dropout": None}, "Without effect here: lora_r, eval_steps (docs"),
        ({"rl_beta": 0.1, "dpo_loss_type": "ipo"}, "Without effect here: rl_beta, dpo_loss_type (docs"),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, "Without effect here: warmup_ratio (docs"),
        (
            {"pretraining_dataset": "d", "datasets": None},
            "pretraining_dataset: the texts are read and tokenized before",
        ),
    ],
)
def test_a_conversion_that_changes_what_runs_is_noted(change: dict[str, Any], note: str) -> None:
    (found,) = read(change, THEIRS).notes
    assert found.startswith(note)


def test_texts_to_pretrain_on_are_datasets() -> None:
    given = [{"path": "c4", "name": "en", "text_column": "content", "type": "pretrain"}, "d"]
    first, second = read({"pretraining_dataset": given, "datasets": None}).datasets
    assert (first.path, first.name, first.field, first.type) == ("c4", "en", "content", "completion")
    assert (second.path, second.field) == ("d", "text")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"adapter": "qlora"}, ["adapter"]),
        ({**ALONE, "load_in_4bit": True}, ["load_in_4bit"]),
        ({**ALONE, "load_in_8bit": True}, ["load_in_8bit"]),
        ({**ALONE, "adapter": "osft", "osft_effective_rank": 4, "load_in_4bit": True}, ["load_in_4bit"]),
        ({**LORA, "load_in_4bit": True, "load_in_8bit": True}, ["load_in_4bit"]),
        ({**LORA, "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}, ["bnb_4bit_quant_type"]),
        ({**LORA, "llm_int8_skip_modules": ["k_proj"]}, ["llm_int8_skip_modules"]),
        ({**LORA, "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_colour": "red"}}, ["bnb_config_kwargs"]),
        ({"gptq": True}, ["gptq"]),
        ({"rl": "kto", "rl_beta": 0.1, "datasets": [{"path": "d", "type": "llama3.ultra", "x": "c"}]}, ["rl"]),
        ({"rl": "grpo", "trl": {"beta": 0.1, "use_vllm": True}}, ["rl"]),
        ({**DPO, "dpo_norm_loss": True, "rpo_alpha": 0.5}, ["dpo_norm_loss", "rpo_alpha"]),
        ({"fsdp_config": {"fsdp_version": 2}, "fsdp_version": 2}, ["fsdp_config"]),
        ({"model_type": "AutoModelForSequenceClassification"}, ["model_type"]),
        ({"plugins": ["my.Plugin"]}, ["plugins"]),
        ({"saves_per_epoch": -1}, ["saves_per_epoch"]),
        ({"saves_per_epoch": 2, "save_steps": 10}, ["save_steps"]),
        ({"flash_attention": True, "attn_implementation": "sdpa"}, ["attn_implementation"]),
        ({"context_parapllel_size": 2}, ["context_parapllel_size"]),
    ],
)  # fmt: skip
def test_only_what_stands_in_the_way_is_named(change: dict[str, Any], lines: list[str]) -> None:
    assert [line.split(":")[0] for line in problems_of({**LORA, **change})] == lines


def test_a_file_of_axolotl_drops_longer_rows_and_says_so() -> None:
    config = read({"dataset_prepared_path": None})
    assert config.excess_length_strategy == "drop"
    assert config.notes[0].startswith("excess_length_strategy: drop") and "key dataset_prepared_path" in config.notes[0]
    assert read({"gradient_checkpointing": None}).excess_length_strategy == "split"
    assert read({"strict": None, "excess_length_strategy": "truncate"}).excess_length_strategy == "truncate"
    texts = {"datasets": [{"path": "d", "type": "completion"}]}
    assert read({"strict": None, **texts}).excess_length_strategy == "split"


def test_axolotl_ends_early_stopped_runs_with_the_best_checkpoint() -> None:
    change = {"early_stopping_patience": 3, "val_set_size": 0.1, "save_steps": 10, "eval_steps": 10}
    assert read(change, THEIRS).load_best_model_at_end
    assert problems_of(change)[0].startswith("early_stopping_patience: has no effect without load_best_model_at_end")
    without = {key: value for key, value in change.items() if key != "val_set_size"}
    config = read(without, THEIRS)  # nothing to evaluate on
    assert config.early_stopping_patience is None and "early_stopping_patience" in config.notes[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rl": None}, "datasets: a `type` is of preference pairs. Set rl: dpo"),
        ({"datasets": ["d"], "test_datasets": [{"path": "d", "type": "alpaca"}]}, "datasets: a `type` is not of preference"),
        ({"rl": None, "datasets": [{"path": "d", "type": {"prompt_format": "x"}}]}, "datasets: a `type` is of preference"),
        ({"datasets": [{"path": "d", "type": {"field_instruction": "x"}}]}, "datasets: a `type` is not of preference pairs"),
        ({"datasets": [{"path": "d", "train_on_eos": "none"}]}, "datasets: with rl: dpo the whole answer is trained"),
        ({"sample_packing": True}, "sample_packing: does not work with rl: dpo"),
        ({"train_on_inputs": True}, "train_on_inputs: does not work with rl: dpo"),
        ({"chunked_loss": True}, "chunked_loss: does not work with rl: dpo"),
        ({"excess_length_strategy": "split"}, "excess_length_strategy: does not work with rl: dpo. Pairs cannot be"),
        ({"reinit_weights": True}, "reinit_weights: does not work with rl: dpo"),
        ({"adapter": "lora", "lora_model_dir": "a"}, "lora_model_dir: does not work with rl: dpo. .* Merge the adapter"),
        ({"dpo_loss_weights": [1, 2]}, "dpo_loss_weights: needs one weight for each loss of dpo_loss_type"),
        ({"dpo_loss_type": "exo_pair"}, "dpo_loss_type: exo_pair needs dpo_label_smoothing"),
        ({"dpo_loss_type": "aot", "dpo_use_weighting": True}, "dpo_use_weighting: does not work with the losses aot"),
        ({"dpo_loss_type": "simpo"}, "dpo_loss_type"),
        ({"rl": "orpo"}, r"rl: 'orpo' is not supported. The nearest is rl: dpo with dpo_loss_type: \[sigmoid, sft\]"),
        ({"rl": "grpo"}, "rl: 'grpo' is not supported. Use TRL's GRPOTrainer with OutsizeMixin"),
    ],
)  # fmt: skip
def test_what_contradicts_preference_training_is_named(change: dict[str, Any], said: str) -> None:
    assert problems_of({"rl_beta": 0.1}) == ["rl_beta: has no effect without rl. Set rl: dpo, or remove rl_beta."]
    types = [{"path": "d", "type": "chatml.icr"}]
    (line,) = problems_of({"rl": "dpo", "datasets": types, **change})
    assert re.match(said, line), line


def test_tables_have_no_key_in_common() -> None:
    assert len(TABLE) == len(AXOLOTL) + len(TABLE.keys() - AXOLOTL.keys())
