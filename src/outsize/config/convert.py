"""Conversions of keys of other tools into settings of a run, for the table in keys.py.

A conversion takes the key, its value and all keys of the file. It raises a ConfigError that completes `<key>: `.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outsize.base.errors import ConfigError
from outsize.base.records import show


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Settings of RunConfig. Lists are appended to what other keys gave."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, which trackers read their settings from."""
    note: str = ""
    """For the user, without the key."""


Convert = Callable[[str, Any, Mapping[str, Any]], Converted]

SDPA = "sdpa computes the same attention"
_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "flash": "flash_attention_2",
    "sdp_attention": "sdpa",
    "xformers_attention": "sdpa",
    "xformers": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
QUANTIZED_OPTIMIZERS = {
    **dict.fromkeys(
        (
            "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_8bit", "ao_adamw_4bit",
            "ao_adamw_fp8", "paged_adamw", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_anyprecision",
        ),
        "adamw",
    ),
    **dict.fromkeys(("lion_8bit", "paged_lion", "paged_lion_8bit", "paged_lion_32bit"), "lion"),
}  # fmt: skip
"""Optimizers with quantized or paged state, and the exact one that runs instead."""
_PLUGINS = (
    "liger", "cut_cross_entropy", "kernels", "swanlab", "expert_parallel", "diffusion", "llm_compressor", "kd",
    "spectrum", "grokfast", "densemixer", "lm_eval", "mora", "nemo_gym", "hatchery",
)  # fmt: skip
"""Plugins of Axolotl (`axolotl.integrations.<name>`) that do nothing without keys of their own in the table."""
TRACKER_SWITCHES = {
    "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow", "mlflow_tracking_uri": "mlflow",
    "mlflow_experiment_name": "mlflow", "use_tensorboard": "tensorboard", "use_trackio": "trackio",
    "trackio_project_name": "trackio",
    "use_comet": "comet_ml", "comet_project_name": "comet_ml",
    "use_swanlab": "swanlab", "swanlab_project": "swanlab",
}  # fmt: skip
_RUN_NAMES = ("wandb_name", "mlflow_run_name", "trackio_run_name", "swanlab_experiment_name")


def per_epoch(key: str, value: Any, given: Mapping[str, Any]) -> Converted:
    """`saves_per_epoch`, `evals_per_epoch`: a share of all steps, as Axolotl computes it."""
    target = "save_steps" if key == "saves_per_epoch" else "eval_steps"
    if target == "eval_steps" and not (given.get("val_set_size") or given.get("test_datasets")):
        return Converted()
    try:
        share = 1 / (float(value) * float(given.get("num_epochs") or given.get("num_train_epochs") or 1))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f"{show(value)} is not a positive number.") from None
    if not share > 0:
        raise ConfigError(f"{show(value)} is not a positive number.")
    return Converted(keys={target: share} if share < 1 else {})


def attention(key: str, value: Any, _: Mapping[str, Any]) -> Converted:
    name = value if key == "attn_implementation" else key
    meant = _ATTENTION.get(name, name) if isinstance(name, str) else name
    return Converted(
        keys={"attn_implementation": meant}, note=f"{name} is not used: {SDPA}" if "xformers" in name else ""
    )


def optimizer(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    name = QUANTIZED_OPTIMIZERS.get(value, value) if isinstance(value, str) else value
    return Converted(keys={"optimizer": name, **({"replaced_optimizer": value} if name != value else {})})


def optimizer_arguments(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    is_mapping = isinstance(value, Mapping)
    return Converted(keys={"optim_args": ",".join(f"{k}={v!r}" for k, v in value.items()) if is_mapping else value})


def adapter(_: str, value: Any, given: Mapping[str, Any]) -> Converted:
    """`qlora` is LoRA on a 4-bit base."""
    return Converted(keys={"adapter": "lora" if value == "qlora" and given.get("load_in_4bit") else value})


def target_modules(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    """As in PEFT: a string of more than a name is a regex, `all-linear` means all linear layers."""
    if value in ("all-linear", ["all-linear"]):
        return Converted(keys={"lora_target_linear": True})
    is_name = isinstance(value, str) and re.fullmatch(r"[\w.-]+", value)
    return Converted(keys={"lora_target_modules": [value] if is_name else value})


_OF_BITSANDBYTES = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
_NO_OUTLIERS = ("llm_int8_threshold", "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload")


def bitsandbytes_settings(_: str, value: Any, given: Mapping[str, Any]) -> Converted:
    """Axolotl's `bnb_config_kwargs`."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{show(value)} is not a mapping. Remove it.")
    known = (*_OF_BITSANDBYTES, *_NO_OUTLIERS, "llm_int8_skip_modules", "bnb_4bit_quant_storage")
    if unknown := [str(name) for name in value if name not in known]:
        raise ConfigError(f"{unknown[0]} is not supported. Remove it.")
    if not (given.get("load_in_4bit") or given.get("load_in_8bit")):
        return Converted()
    names = [*(_OF_BITSANDBYTES if given.get("load_in_4bit") else ()), "llm_int8_skip_modules"]
    return Converted(keys={name: value[name] for name in names if value.get(name) is not None})


def quant_storage(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    return Converted(note="packed weights are stored as uint8; the bytes are the same in any dtype")


def half_precision(key: str, __: Any, ___: Mapping[str, Any]) -> Converted:
    """`bf16: false` beside it is dropped before (see normalize.py)."""
    note = "weights and activations are bf16, with exact fp32 master weights and no loss scaling"
    return Converted(keys={"bf16": True}, note=note)


def dtype(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    name = str(value).removeprefix("torch.")
    if name not in ("bfloat16", "bf16", "auto", "float32", "fp32"):
        raise ConfigError(f"{show(value)} is not supported. Use bfloat16, or float32.")
    return Converted(keys={"bf16": name not in ("float32", "fp32")})


def gpu_memory_limit(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    return Converted(keys={"gpu_memory": f"{value}GiB" if isinstance(value, int) else value})


def chat_template(_: str, value: Any, given: Mapping[str, Any]) -> Converted:
    """The tokenizer's own is the default; `jinja` means `chat_template_jinja`."""
    is_default = value in ("tokenizer_default", "jinja") or given.get("chat_template_jinja")
    return Converted(keys={} if is_default else {"chat_template": value})


def tokens(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    """A mapping is an old spelling of `special_tokens`."""
    return Converted(keys={"special_tokens" if isinstance(value, Mapping) else "tokens": value})


def tracker(key: str, value: Any, _: Mapping[str, Any]) -> Converted:
    if key in _RUN_NAMES:
        return Converted(keys={"run_name": value})
    name = TRACKER_SWITCHES.get(key)
    written = str(value).lower() if isinstance(value, bool) else str(value)
    variables = {} if key.startswith("use_") else {key.upper(): written}
    return Converted(keys={"report_to": [name]} if name else {}, environment=variables)


def pretraining_dataset(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    """Texts, each with a column. Axolotl streams them."""
    datasets = []
    for item in value if isinstance(value, list) else [value]:
        one = dict(item) if isinstance(item, Mapping) else {"path": item}
        one.pop("type", None)
        datasets.append({"field": one.pop("text_column", "text"), **one, "type": "completion"})
    return Converted(
        keys={"datasets": datasets},
        note="the texts are read and tokenized before the first step, not streamed; `split: train[:1%]` reads fewer",
    )


def plugins(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    others = [name for name in names if not re.search(rf"\.({'|'.join(_PLUGINS)})(\.|$)", name)]
    if others:
        raise ConfigError(f"{', '.join(others)} cannot run here. Remove it, or train with OutsizeTrainer.")
    return Converted()


def model_type(_: str, value: Any, given: Mapping[str, Any]) -> Converted:
    is_refused = given.get("reward_model") or given.get("process_reward_model")
    if "Classification" in str(value) and not is_refused:
        raise ConfigError(f"{show(value)} is not a language model. Train it with OutsizeTrainer.")
    return Converted()


_OTHER_METHODS = {
    "kto": "Use TRL's KTOTrainer with OutsizeMixin in Python (docs/other-code.md).",
    "grpo": "Use TRL's GRPOTrainer with OutsizeMixin in Python (docs/other-code.md).",
    "gdpo": "Use TRL's GRPOTrainer with OutsizeMixin in Python (docs/other-code.md).",
    "orpo": "The nearest is rl: dpo with dpo_loss_type: [sigmoid, sft], on the same data.",
    "simpo": "The nearest is rl: dpo with dpo_loss_type: sigmoid_norm, on the same data.",
}


def preference_method(_: str, value: Any, given: Mapping[str, Any]) -> Converted:
    """`ipo` is a loss of DPO."""
    if value == "dpo":
        return Converted(keys={"rl": "dpo"})
    if value == "ipo":
        return Converted(keys={"rl": "dpo", "dpo_loss_type": ["ipo"]})
    raise ConfigError(f"{show(value)} is not supported. {_OTHER_METHODS.get(str(value), 'Use rl: dpo, or remove it.')}")


def trl_settings(_: str, value: Any, __: Mapping[str, Any]) -> Converted:
    beta = value.get("beta") if isinstance(value, Mapping) else None
    return Converted(keys={} if beta is None else {"rl_beta": beta})


def curriculum(_: str, __: Any, ___: Mapping[str, Any]) -> Converted:
    return Converted(keys={"train_sampling_strategy": "sequential"})
