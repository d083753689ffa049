"""What two or more keys say against each other, as a table.

Each row names all keys it looks at: where one of them is wrong by itself, that is told and the row is left out.
"""

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass

from outsize.base.errors import tell
from outsize.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Contradiction:
    keys: tuple[str, ...]
    """The first is the one that is complained about."""
    applies: Callable[[RunConfig, Set[str]], bool]
    """Of a config and the keys that were given."""
    expected: str
    found: str
    """May show `{config.…}`."""
    do: str


_EVAL_DATA = ("val_set_size", "test_datasets")
_SAVING = ("save_strategy", "save_steps")
_EVALUATING = ("eval_strategy", "eval_steps", *_EVAL_DATA)
_GIVE_EVAL_DATA = "Give test_datasets or val_set_size, or leave it out"
_LORA_KEYS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name.startswith(("lora_", "peft_")))


def _both_given(one: str, other: str, expected: str) -> Contradiction:
    do = f"Leave one of them out (on the command line: --set {other}=null)"
    return Contradiction(
        (one, other), lambda config, given: {one, other} <= given, expected, f"{other} is given too", do
    )


def _alone(key: str, other: str, value: str) -> Contradiction:
    """`key` means something only where `other` is on."""
    expected, do = f"it goes with {other}: {value}", f"Write {other}: {value}, or leave {key} out"
    return Contradiction(
        (key, other),
        lambda config, given: key in given and not getattr(config, other),
        expected,
        "that is not given",
        do,
    )


_SPLIT = ("batch_size", "micro_batch_size", "gradient_accumulation_steps")


def _does_not_divide(config: RunConfig, given: Set[str]) -> bool:
    rows, passes = config.micro_batch_size, config.gradient_accumulation_steps
    if config.batch_size is None:
        return False
    return rows * passes != config.batch_size if rows and passes else config.batch_size % (rows or passes or 1) > 0


CONTRADICTIONS = (
    Contradiction(
        _SPLIT,
        _does_not_divide,
        "it is micro_batch_size × gradient_accumulation_steps",
        "it is {config.batch_size} and they are {config.micro_batch_size} and {config.gradient_accumulation_steps}",
        "Leave one of them out, or correct it",
    ),
    Contradiction(
        (*_SPLIT, "plan"),
        lambda config, given: config.plan_file is not None and given & set(_SPLIT) == {"batch_size"},
        "a plan is for one micro-batch",
        "it is left open",
        "Give micro_batch_size as in the plan, or leave the plan out",
    ),
    _both_given("max_steps", "num_epochs", "the length of a run is told once"),
    _both_given("warmup_steps", "warmup_ratio", "the length of the warmup is told once"),
    Contradiction(
        ("lr_scheduler", "warmup_steps", "warmup_ratio"),
        lambda config, given: config.lr_scheduler == "constant" and bool(config.warmup_steps or config.warmup_ratio),
        "constant has no warmup",
        "one is asked for",
        "Write constant_with_warmup, or leave the warmup out",
    ),
    Contradiction(
        ("test_datasets", "val_set_size"),
        lambda config, given: bool(config.test_datasets) and config.val_set_size > 0,
        "the data to evaluate on is told once",
        "val_set_size is {config.val_set_size}",
        "Leave one of them out",
    ),
    Contradiction(
        ("eval_strategy", *_EVAL_DATA),
        lambda config, given: config.eval_strategy in ("steps", "epoch") and not config.has_eval_data,
        "there is data to evaluate on",
        "none is given",
        _GIVE_EVAL_DATA,
    ),
    Contradiction(
        ("eval_steps", *_EVAL_DATA),
        lambda config, given: config.eval_steps is not None and not config.has_eval_data,
        "there is data to evaluate on",
        "none is given",
        _GIVE_EVAL_DATA,
    ),
    Contradiction(
        ("eval_steps", "eval_strategy"),
        lambda config, given: config.eval_steps is not None and config.eval_strategy in ("no", "epoch"),
        "it goes with eval_strategy: steps",
        "eval_strategy is {config.eval_strategy}",
        "Leave one of them out",
    ),
    Contradiction(
        ("eval_strategy", "eval_steps"),
        lambda config, given: config.eval_strategy == "steps" and config.eval_steps is None,
        "steps goes with eval_steps",
        "it is not given",
        "Give eval_steps, or write epoch",
    ),
    Contradiction(
        ("save_steps", "save_strategy"),
        lambda config, given: config.save_steps is not None and config.save_strategy != "steps",
        "it goes with save_strategy: steps",
        "save_strategy is {config.save_strategy}",
        "Leave one of them out",
    ),
    Contradiction(
        ("load_best_model_at_end", *_EVAL_DATA),
        lambda config, given: config.load_best_model_at_end and not config.has_eval_data,
        "the best model is found on data to evaluate on",
        "none is given",
        _GIVE_EVAL_DATA,
    ),
    Contradiction(
        ("load_best_model_at_end", "save_strategy", *_EVALUATING),
        lambda config, given: (
            config.load_best_model_at_end
            and config.has_eval_data
            and not config.save_strategy == config.evaluates != "no"
        ),
        "every checkpoint is evaluated, so save_strategy and eval_strategy are both steps or both epoch",
        "it saves by {config.save_strategy} and evaluates by {config.evaluates}",
        "Set both to the same",
    ),
    Contradiction(
        ("load_best_model_at_end", *_SAVING, *_EVALUATING),
        lambda config, given: (
            config.load_best_model_at_end
            and bool(config.save_steps and config.eval_steps and config.save_steps % config.eval_steps)
        ),
        "every checkpoint is evaluated, so save_steps is a multiple of eval_steps",
        "they are {config.save_steps} and {config.eval_steps}",
        "Change one of them",
    ),
    *(_alone(key, "load_best_model_at_end", "true") for key in ("early_stopping_patience", "metric_for_best_model")),
    *(_alone(key, "adapter", "lora") for key in _LORA_KEYS),
    Contradiction(
        ("adapter", "lora_target_modules", "lora_target_linear"),
        lambda config, given: (
            config.adapter is not None and not config.lora_target_modules and not config.lora_target_linear
        ),
        "an adapter names the modules it adapts",
        "there are none",
        "Give lora_target_modules, or lora_target_linear: true",
    ),
    Contradiction(
        ("reinit_weights", "adapter"),
        lambda config, given: config.reinit_weights and config.adapter is not None,
        "an adapter adapts trained weights",
        "they are to be random",
        "Leave one of them out",
    ),
    Contradiction(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
        lambda config, given: bool(config.resume_from_checkpoint) and config.auto_resume_from_checkpoints,
        "the checkpoint to resume from is told once",
        "auto_resume_from_checkpoints is true",
        "Leave one of them out",
    ),
)


def contradictions(config: RunConfig, *, given: Set[str], wrong: Set[str]) -> list[str]:
    """One line each. `given`: the keys that were written; `wrong`: those of them whose value in `config` is only a
    stand-in.
    """
    return [
        f"{row.keys[0]}: {tell(row.expected, row.found.format(config=config), row.do)}"
        for row in CONTRADICTIONS
        if wrong.isdisjoint(row.keys) and row.applies(config, given)
    ]
