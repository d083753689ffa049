"""Trainer arguments that concern placement or the optimizer: used, turned off with a note, or refused."""

import ast
import math
from collections.abc import Iterable
from typing import Any, Literal

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.optim.names import DEFAULT, OPTIMIZERS, find_name, spec_class
from outsize.optim.spec import OptimizerSpec
from outsize.schedule.plan import UpdateMode

NonFinite = Literal["raise", "skip"]
_PLANNED = {
    "gradient_checkpointing": "the plan decides per block what is recomputed",
    "activation_offloading": "the plan decides per block which activations go to the host",
}
_OURS = "the optimizer is the engine's, with learning_rate, weight_decay, adam_* and max_grad_norm; leave it out"
_REFUSED = {
    "deepspeed": "outsize owns placement and optimizer; leave deepspeed out",
    "fsdp": "outsize trains on one device; leave fsdp out",
    "fp16": "outsize trains bf16 weights with exact fp32 masters and no loss scaling; load the model in bf16, or use "
    "bf16=True",
    "fp16_full_eval": "a prepared model keeps its dtype; leave it out",
    "bf16_full_eval": "a prepared model keeps its dtype; leave it out, or load the model in bf16",
    "auto_find_batch_size": "memory is planned; choose per_device_train_batch_size with `outsize plan`",
    "torch_compile": "the schedule needs the model's own layers; leave it out",
    "use_liger_kernel": "its kernels replace the forward that was planned; leave it out",
    "parallelism_config": "outsize trains on one device; leave it out",
    "optim_target_modules": _OURS,
    "use_vllm": "vLLM keeps its own weights and cache on the GPU, outside of the plan; leave it out",
    "use_transformers_continuous_batching": "its cache is outside of the plan; leave it out",
    "use_transformers_paged": "its cache is outside of the plan; leave it out",
    "use_adaptive_entropy": "its coefficient would not be in the checkpoint; leave it out, and set entropy_coef",
    "enable_jit_checkpoint": "it saves in the middle of a step; use save_steps, or a callback that sets "
    "control.should_save",
}
_TRAINERS = {
    "A2POTrainer", "AsyncDistillationTrainer", "AsyncGRPOTrainer", "DistillationTrainer", "GKDTrainer", "GOLDTrainer",
    "IWOPDTrainer", "MiniLLMTrainer", "NashMDTrainer", "OnlineDPOTrainer", "PPOTrainer", "SDFTTrainer", "SDPOTrainer",
    "ServerDistillationTrainer", "XPOTrainer",
}  # fmt: skip
"""Trainers of TRL that run a teacher or generate in ways that are not part of a plan."""


def trl_classes(trainer: type) -> set[str]:
    """Names of the classes of TRL that a Trainer class inherits from. TRL itself need not be installed."""
    return {base.__name__ for base in trainer.__mro__ if base.__module__.partition(".")[0] == "trl"}


def refuse_trainer(trainer: type) -> None:
    for name in sorted(trl_classes(trainer) & _TRAINERS):
        raise ConfigError(
            f"{name} does not work with outsize: it runs a second model, or generates, in a way that is not part of a "
            "plan. Use SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer or RLOOTrainer, or train without "
            "outsize."
        )


def loads_reference(trainer: type, given: dict[str, Any]) -> bool:
    """Whether TRL itself loads a reference model."""
    classes = trl_classes(trainer)
    is_online, beta = bool(classes & {"GRPOTrainer", "RLOOTrainer"}), getattr(given.get("args"), "beta", 0.0)
    if hasattr(given.get("model"), "peft_config"):
        return False  # its adapter is turned off instead
    has_reference = bool(beta) if is_online else bool(classes & {"DPOTrainer", "KTOTrainer"})
    return has_reference and given.get("ref_model") is None and given.get("peft_config") is None


def take_over(args: Any, *, optimizers: Any = None, optimizer_cls_and_kwargs: Any = None) -> None:
    """Turn off options that the plan decides, with a note, and refuse unsupported ones, all in one error."""
    for name, why in _PLANNED.items():
        if getattr(args, name, False):
            log.info("%s is turned off: %s", name, why)
            setattr(args, name, False)
    wrong = [f"{name}={getattr(args, name)!r}: {why}" for name, why in _REFUSED.items() if getattr(args, name, None)]
    if find_name(optim := _optim(args)) is None:
        names = ", ".join(others[0] if others else name for name, (_, others) in OPTIMIZERS.items())
        wrong.append(f"optim={optim!r}: outsize has no such optimizer; use one of {names}")
    else:
        try:
            _settings(args)
        except ConfigError as error:
            wrong.append(str(error).rstrip("."))
    if any(given is not None for given in optimizers or ()):
        wrong.append(f"optimizers: {_OURS}; for the schedule there are lr_scheduler_type and create_scheduler")
    if optimizer_cls_and_kwargs is not None:
        wrong.append(f"optimizer_cls_and_kwargs: {_OURS}")
    if args.n_gpu > 1:
        wrong.append(f"{args.n_gpu} GPUs are visible: outsize trains on one; set CUDA_VISIBLE_DEVICES=0")
    if args.world_size > 1:
        wrong.append(f"{args.world_size} processes: outsize trains on one device; start it without a launcher")
    if wrong:
        raise ConfigError("These arguments do not work with outsize. " + "; ".join(wrong) + ".")


def clips(args: Any) -> bool:
    return args.max_grad_norm > 0 and math.isfinite(args.max_grad_norm)


def update_mode(args: Any, nonfinite: NonFinite = "raise") -> UpdateMode:
    # Gradients must be kept if clipping or a check reads all of them before the update.
    return "after_step" if clips(args) or nonfinite == "skip" or args.gradient_accumulation_steps > 1 else "in_backward"


def _optim(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _options(args: Any, allowed: Iterable[str]) -> dict[str, Any]:
    """The settings in `optim_args`, such as `momentum=0.9,nesterov=True`."""
    given = getattr(args, "optim_args", None) or ""
    pairs = [pair.partition("=") for pair in str(given).replace(" ", "").split(",") if pair]
    if unknown := sorted({name for name, _, _ in pairs} - set(allowed)):
        raise ConfigError(
            f"optim_args={given!r}: {unknown[0]} is not a setting of {_optim(args)}. "
            f"Further settings: {', '.join(sorted(allowed)) or 'none'}."
        )
    try:
        return {name: ast.literal_eval(value) for name, _, value in pairs}
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"optim_args={given!r} is not of the form name=value,name=value. Correct it.") from error


def _settings(args: Any) -> tuple[type[OptimizerSpec], dict[str, Any]]:
    """The optimizer class, and those of its settings that not all optimizers have."""
    spec = spec_class(find_name(_optim(args)) or DEFAULT)
    own = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    settings = {name: value for name, value in own.items() if name in spec.checks}
    return spec, settings | _options(args, spec.checks.keys() - {"lr", "weight_decay", *own})


def optimizer_of(
    args: Any, decay: Iterable[str], trainable: Iterable[str], nonfinite: NonFinite = "raise"
) -> OptimizerSpec:
    """The engine's optimizer, in the Trainer's two groups: weights that decay, and biases and norms that do not."""
    spec, settings = _settings(args)
    decaying = set(decay)
    names = list(trainable)
    groups = [([n for n in names if n in decaying], args.weight_decay), ([n for n in names if n not in decaying], 0.0)]
    return spec(
        **settings,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm if clips(args) else None,
        update=update_mode(args, nonfinite),
        nonfinite=nonfinite,
        groups=[{"params": members, "weight_decay": decay} for members, decay in groups if members],
    )
