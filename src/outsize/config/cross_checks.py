"""Checks of settings that contradict each other, as a table.

A row names all keys it reads. It is skipped if one of them is invalid by itself, since that is reported already.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import NamedTuple

from outsize.config.prune import PruneConfig
from outsize.config.run import DatasetConfig, RunConfig
from outsize.config.types import PAIR_KEYS, PAIR_TYPES
from outsize.model.strategies import STRATEGIES


class Contradiction(NamedTuple):
    keys: tuple[str, ...]
    """The first one is named in the message."""
    applies: Callable[[RunConfig, Set[str]], bool]
    """Takes the config and the keys that were given."""
    problem: str
    """What is wrong and what to do. May contain `{config.…}`."""


_EVAL_DATA = ("val_set_size", "test_datasets")
_EVALUATING = ("eval_strategy", "eval_steps", *_EVAL_DATA)
_LORA_KEYS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name.startswith(("lora_", "peft_")))
_DPO_KEYS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name.startswith(("rl_", "dpo_")))
_OFFLOADING_PINS = {strategy.pin for strategy in STRATEGIES if strategy.sends}
_CHAT_TYPES = ("chat_template", "chat_template.default")
_SHARED = {"field_system"}
_OSFT_KEYS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name.startswith("osft_"))
_4BIT_KEYS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name.startswith("bnb_4bit_"))
_OSFT_RANKS = ("osft_unfreeze_rank_ratio", "osft_effective_rank")
_NOT_PRUNING = {
    "adapter": "Layers are trained whole", "rl": "Layers learn from the teacher alone",
    "plan": "The memory is planned per layer", "num_epochs": "prune.tokens is the length of the run",
    "max_steps": "prune.tokens is the length of the run", "reinit_weights": "The teacher's weights are needed",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "Variants are cut from the teacher's weights"),
    "unfrozen_parameters": "prune.learn says what is trained", "load_best_model_at_end": "prune.keep says what is kept",
    "optim_args": "Variants are trained with AdamW", "save_only_model": "prune.keep says what is kept",
}  # fmt: skip
"""Keys of a run that `outsize prune` cannot have, and why."""
_SPLIT = ("batch_size", "micro_batch_size", "gradient_accumulation_steps")


def _both_given(one: str, other: str) -> Contradiction:
    problem = f"conflicts with {other}. Remove one of them (on the command line: --set {other}=null)."
    return Contradiction((one, other), lambda config, given: {one, other} <= given, problem)


def _conflicts_with_pairs(key: str, is_set: Callable[[RunConfig], bool], instead: str) -> Contradiction:
    problem = f"does not work with rl: dpo. {instead}"
    return Contradiction((key, "rl"), lambda config, given: config.rl is not None and is_set(config), problem)


def _of_hidden_size(is_wrong: Callable[[PruneConfig], bool], problem: str) -> Contradiction:
    return Contradiction(
        ("prune",),
        lambda config, given: (
            config.prune is not None and config.prune.hidden_size is not None and is_wrong(config.prune)
        ),
        problem,
    )


def _of_datasets(is_wrong: Callable[[DatasetConfig, bool], object], problem: str) -> Contradiction:
    """`is_wrong` takes a dataset, and whether it is of pairs."""
    return Contradiction(
        ("datasets", "test_datasets", "rl"),
        lambda config, given: any(
            is_wrong(source, config.rl is not None) for source in (*config.datasets, *config.test_datasets)
        ),
        problem,
    )


def _needs(key: str, other: str, value: str) -> Contradiction:
    problem = f"has no effect without {other}. Set {other}: {value}, or remove {key}."
    return Contradiction((key, other), lambda config, given: key in given and not getattr(config, other), problem)


def _needs_adapter(key: str, kind: str) -> Contradiction:
    problem = f"has no effect without adapter: {kind}. Set adapter: {kind}, or remove {key}."
    return Contradiction((key, "adapter"), lambda config, given: key in given and config.adapter != kind, problem)


def _needs_lora(key: str) -> Contradiction:
    problem = (
        "quantized weights cannot be trained, only an adapter beside them. Set adapter: lora, or remove "
        f"{key}: bf16 weights that do not fit the GPU are streamed from host memory."
    )
    return Contradiction(
        (key, "adapter"),
        lambda config, given: getattr(config, key) and config.adapter != "lora" and config.prune is None,
        problem,
    )


def _conflicts_with_pruning(key: str, why: str) -> Contradiction:
    return Contradiction(
        (key, "prune"),
        lambda config, given: config.prune is not None and key in given,
        f"has no meaning with prune. {why}: remove {key}, or prune.",
    )


def _needs_eval_data(key: str, is_set: Callable[[RunConfig], bool]) -> Contradiction:
    problem = f"needs evaluation data. Set test_datasets or val_set_size, or remove {key}."
    return Contradiction((key, *_EVAL_DATA), lambda config, given: is_set(config) and not config.has_eval_data, problem)


def _does_not_divide(config: RunConfig, given: Set[str]) -> bool:
    rows, passes = config.micro_batch_size, config.gradient_accumulation_steps
    if config.batch_size is None:
        return False
    return rows * passes != config.batch_size if rows and passes else config.batch_size % (rows or passes or 1) > 0


CONTRADICTIONS = (
    Contradiction(
        _SPLIT,
        _does_not_divide,
        "{config.batch_size} is not micro_batch_size ({config.micro_batch_size}) × gradient_accumulation_steps "
        "({config.gradient_accumulation_steps}). Correct or remove one of them.",
    ),
    Contradiction(
        (*_SPLIT, "plan"),
        lambda config, given: config.plan_file is not None and given & set(_SPLIT) == {"batch_size"},
        "does not fix the micro-batch, and a plan is for one. Set micro_batch_size as in the plan, or remove the plan.",
    ),
    _both_given("warmup_steps", "warmup_ratio"),
    Contradiction(
        ("lr_scheduler", "warmup_steps", "warmup_ratio"),
        lambda config, given: config.lr_scheduler == "constant" and bool(config.warmup_steps or config.warmup_ratio),
        "constant has no warmup. Use constant_with_warmup, or remove the warmup.",
    ),
    Contradiction(
        ("test_datasets", "val_set_size"),
        lambda config, given: bool(config.test_datasets) and config.val_set_size > 0,
        "conflicts with val_set_size ({config.val_set_size}). Remove one of them.",
    ),
    _needs_eval_data("eval_strategy", lambda config: config.eval_strategy in ("steps", "epoch")),
    _needs_eval_data("eval_steps", lambda config: config.eval_steps is not None),
    _needs_eval_data("load_best_model_at_end", lambda config: config.load_best_model_at_end),
    Contradiction(
        ("eval_steps", "eval_strategy"),
        lambda config, given: config.eval_steps is not None and config.eval_strategy in ("no", "epoch"),
        "conflicts with eval_strategy: {config.eval_strategy}. Remove one of them.",
    ),
    Contradiction(
        ("eval_strategy", "eval_steps"),
        lambda config, given: config.eval_strategy == "steps" and config.eval_steps is None,
        "steps needs eval_steps. Set eval_steps, or use epoch.",
    ),
    Contradiction(
        ("save_steps", "save_strategy"),
        lambda config, given: config.save_steps is not None and config.save_strategy != "steps",
        "conflicts with save_strategy: {config.save_strategy}. Remove one of them.",
    ),
    Contradiction(
        ("load_best_model_at_end", "save_strategy", *_EVALUATING),
        lambda config, given: (
            config.load_best_model_at_end
            and config.has_eval_data
            and not config.save_strategy == config.evaluates != "no"
        ),
        "needs an evaluation of every checkpoint, but save_strategy is {config.save_strategy} and eval_strategy is "
        "{config.evaluates}. Set both to steps or both to epoch.",
    ),
    Contradiction(
        ("load_best_model_at_end", "save_strategy", "save_steps", *_EVALUATING),
        lambda config, given: (
            config.load_best_model_at_end
            and bool(config.save_steps and config.eval_steps and config.save_steps % config.eval_steps)
        ),
        "needs an evaluation of every checkpoint, but save_steps ({config.save_steps}) is not a multiple of "
        "eval_steps ({config.eval_steps}). Change one of them.",
    ),
    *(_needs(key, "load_best_model_at_end", "true") for key in ("early_stopping_patience", "metric_for_best_model")),
    Contradiction(
        ("load_in_4bit", "load_in_8bit"),
        lambda config, given: config.load_in_4bit and config.load_in_8bit,
        "conflicts with load_in_8bit. Remove one of them.",
    ),
    *(_needs_lora(key) for key in ("load_in_4bit", "load_in_8bit")),
    *(_needs(key, "load_in_4bit", "true") for key in _4BIT_KEYS),
    Contradiction(
        ("llm_int8_skip_modules", "load_in_4bit", "load_in_8bit"),
        lambda config, given: bool(config.llm_int8_skip_modules) and config.quantization is None,
        "has no effect without load_in_4bit or load_in_8bit. Set one of them, or remove llm_int8_skip_modules.",
    ),
    *(_needs_adapter(key, "lora") for key in _LORA_KEYS),
    *(_needs_adapter(key, "osft") for key in _OSFT_KEYS),
    Contradiction(
        ("adapter", *_OSFT_RANKS),
        lambda config, given: (
            config.adapter == "osft"
            and (config.osft_unfreeze_rank_ratio is None) == (config.osft_effective_rank is None)
        ),
        "osft needs one rank. Set osft_unfreeze_rank_ratio (0.25 trains a quarter of the directions) or "
        "osft_effective_rank, not both.",
    ),
    *(_needs(key, "rl", "dpo") for key in _DPO_KEYS),
    *(_needs(key, "teacher_model", "a folder or hub id") for key in ("kd_alpha", "kd_temperature")),
    _conflicts_with_pairs("teacher_model", lambda config: config.teacher_model is not None, "Remove one of them."),
    Contradiction(
        ("teacher_model", "chunked_loss"),
        lambda config, given: config.teacher_model is not None and config.chunked_loss is False,
        "the loss of distillation is computed in chunks. Remove chunked_loss.",
    ),
    _of_datasets(
        lambda source, pairs: not pairs and (source.type in PAIR_TYPES or PAIR_KEYS & set(source.prompt or ())),
        "a `type` is of preference pairs. Set rl: dpo, or another type.",
    ),
    _of_datasets(
        lambda source, pairs: (
            pairs
            and (source.type not in (None, *_CHAT_TYPES, *PAIR_TYPES) or set(source.prompt or ()) - PAIR_KEYS - _SHARED)
        ),
        f"a `type` is not of preference pairs. Set one of {', '.join((*_CHAT_TYPES, *PAIR_TYPES))}, a mapping with "
        f"{', '.join(sorted(PAIR_KEYS))}, or remove it if the columns are chosen, rejected and perhaps prompt.",
    ),
    _of_datasets(
        lambda source, pairs: (
            pairs and (source.roles_to_train != ("assistant",) or source.train_on_eos or source.message_field_training)
        ),
        "with rl: dpo the whole answer is trained. Remove roles_to_train, train_on_eos and message_field_training.",
    ),
    _conflicts_with_pairs("sample_packing", lambda config: config.sample_packing, "Use sample_packing: false."),
    _conflicts_with_pairs("train_on_inputs", lambda config: config.train_on_inputs, "Use train_on_inputs: false."),
    _conflicts_with_pairs(
        "chunked_loss", lambda config: config.chunked_loss is True, "Remove it: TRL computes the loss in chunks anyway."
    ),
    _conflicts_with_pairs(
        "excess_length_strategy",
        lambda config: config.excess_length_strategy == "split",
        "Pairs cannot be split: use drop, truncate or raise.",
    ),
    _conflicts_with_pairs(
        "reinit_weights",
        lambda config: config.reinit_weights,
        "The reference is the model that is read, so its weights are needed. Remove it.",
    ),
    _conflicts_with_pairs(
        "lora_model_dir",
        lambda config: config.lora_model_dir is not None,
        "The reference is base_model without an adapter. Merge the adapter (outsize export FOLDER merged --merge), and "
        "use base_model: merged.",
    ),
    Contradiction(
        ("dpo_loss_weights", "dpo_loss_type"),
        lambda config, given: len(config.dpo_loss_weights) not in (0, len(config.dpo_loss_type)),
        "needs one weight for each loss of dpo_loss_type ({config.dpo_loss_type}). Correct one of them.",
    ),
    Contradiction(
        ("dpo_loss_type", "dpo_label_smoothing"),
        lambda config, given: "exo_pair" in config.dpo_loss_type and not config.dpo_label_smoothing,
        "exo_pair needs dpo_label_smoothing. Set it; 1e-3 is usual.",
    ),
    Contradiction(
        ("dpo_use_weighting", "dpo_loss_type"),
        lambda config, given: config.dpo_use_weighting and not {"aot", "aot_unpaired"}.isdisjoint(config.dpo_loss_type),
        "does not work with the losses aot and aot_unpaired. Remove it, or use another dpo_loss_type.",
    ),
    Contradiction(
        ("adapter", "lora_target_modules", "lora_target_linear", "lora_model_dir"),
        lambda config, given: (
            config.adapter == "lora"
            and not (config.lora_target_modules or config.lora_target_linear or config.lora_model_dir)
        ),
        "has no modules to adapt. Set lora_target_modules, or lora_target_linear: true.",
    ),
    Contradiction(
        ("unfrozen_parameters", "adapter"),
        lambda config, given: bool(config.unfrozen_parameters) and config.adapter == "lora",
        "an adapter freezes all weights of its base. Remove unfrozen_parameters, or use lora_modules_to_save.",
    ),
    Contradiction(
        ("reinit_weights", "adapter"),
        lambda config, given: config.reinit_weights and config.adapter is not None,
        "an adapter of random weights is useless, and random weights have nothing to keep. Remove reinit_weights or "
        "adapter.",
    ),
    *(_conflicts_with_pruning(key, why) for key, why in _NOT_PRUNING.items()),
    Contradiction(
        ("optimizer", "prune"),
        lambda config, given: config.prune is not None and config.optimizer != "adamw",
        "variants are trained with AdamW. Remove optimizer.",
    ),
    Contradiction(
        ("prune",),
        lambda config, given: config.prune is not None and not config.prune.has_variants,
        "has no variants. Name some with intermediate_size, num_key_value_heads, experts, hidden_size, skip, linear or "
        "copy.",
    ),
    _of_hidden_size(
        lambda prune: prune.importance == "truncate",
        "hidden_size needs measured importance, since norms are rescaled with it. Remove importance: truncate.",
    ),
    _of_hidden_size(
        lambda prune: prune.form == "padded", "form: padded has the teacher's hidden size. Remove form, or hidden_size."
    ),
    _of_hidden_size(
        lambda prune: prune.costs is not None,
        "costs: the table has no place for seconds of the teacher, whose hidden size differs. Remove costs, or "
        "hidden_size.",
    ),
    Contradiction(
        ("prune",),
        lambda config, given: (
            config.prune is not None and "block" in config.prune.learn and len(config.prune.learn) > 1
        ),
        "learn: block trains both sub-blocks together and cannot be mixed with others. Remove one of them.",
    ),
    Contradiction(
        ("prune", *_EVAL_DATA),
        lambda config, given: (
            config.prune is not None and config.prune.keep in ("best", "both") and not config.has_eval_data
        ),
        "keep: {config.prune.keep} needs validation data. Set val_set_size or test_datasets, or keep: latest.",
    ),
    Contradiction(
        ("activation_offloading",),
        lambda config, given: config.activation_offloading == "disk",
        "disk is for training without a plan (OffloadTrainer in Python, docs/long-context.md). Use auto or true, with "
        "host_memory as the limit.",
    ),
    Contradiction(
        ("activation_offloading", "plan"),
        lambda config, given: (
            config.activation_offloading != "auto"
            and (config.plan_file is not None or bool(_OFFLOADING_PINS & set(config.pins or {})))
        ),
        "{config.activation_offloading} conflicts with plan, which fixes the layers whose activations are offloaded. "
        "Remove one of them.",
    ),
    Contradiction(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
        lambda config, given: bool(config.resume_from_checkpoint) and config.auto_resume_from_checkpoints,
        "conflicts with auto_resume_from_checkpoints. Remove one of them.",
    ),
)


def contradictions(config: RunConfig, *, given: Set[str], wrong: Set[str]) -> list[str]:
    """One line each. `given`: the keys that were written. `wrong`: those whose value in `config` is a placeholder."""
    return [
        f"{row.keys[0]}: {row.problem.format(config=config)}"
        for row in CONTRADICTIONS
        if wrong.isdisjoint(row.keys) and row.applies(config, given)
    ]
