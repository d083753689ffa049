"""Adds a PEFT adapter to a model."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.lora.fuse import PARTS, Part, fuse_lora


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    peft_config: Any
    """A config of PEFT, such as LoraConfig."""
    fp32: bool = False
    """PEFT's default: adapter weights in fp32 over a bf16 base. False: in the base's dtype."""
    folder: str | None = None
    """Where its weights are. None: they are new."""
    fused: tuple[Part, ...] = PARTS
    """Its parts that run fused (lora/fuse.py)."""


def lora(*, fp32: bool = False, fused: tuple[Part, ...] = PARTS, **settings: Any) -> Adapter:
    """LoRA, by default on all linear layers except the output head. `settings`: of LoraConfig."""
    config = _peft().LoraConfig(**{"target_modules": "all-linear", **settings})
    return Adapter(peft_config=config, fp32=fp32, fused=fused)


def saved_lora(folder: str, *, fp32: bool = False, fused: tuple[Part, ...] = PARTS) -> Adapter:
    """The adapter that was saved to a folder, to continue training it."""
    try:
        found = _peft().PeftConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"lora_model_dir: {folder} has no adapter ({_first_line(error)}). Name the folder of one, or remove it."
        ) from None
    if found.peft_type != "LORA":
        raise ConfigError(f"lora_model_dir: {folder} has an adapter of type {found.peft_type}. Name one of LoRA.")
    found.inference_mode = False
    return Adapter(peft_config=found, fp32=fp32, folder=folder, fused=fused)


def add_adapter(model: nn.Module, adapter: Adapter, **settings: Any) -> nn.Module:
    """Wrap the model in a PEFT model, and fuse its LoRA layers. `settings`: of `get_peft_model`."""
    peft, settings = _peft(), {"autocast_adapter_dtype": adapter.fp32, **settings}
    wrapped: nn.Module
    _warn_of_missing(model, adapter.peft_config.target_modules)
    try:
        if adapter.folder is None:
            wrapped = peft.get_peft_model(model, adapter.peft_config, **settings)
        else:
            settings |= {"config": adapter.peft_config, "is_trainable": True, "torch_device": "cpu"}
            wrapped = peft.PeftModel.from_pretrained(model, adapter.folder, **settings)
    except ValueError as error:
        found = _first_line(error).removesuffix(_PEFT_ADVICE).rstrip(". ")
        raise ConfigError(
            f"lora_target_modules: {found}. Name linear layers of the model{_linear_layers(model)}, or use "
            "lora_target_linear: true."
        ) from None
    return fuse_lora(wrapped, adapter.fused)


def _warn_of_missing(model: nn.Module, targets: str | set[str] | None) -> None:
    """PEFT refuses targets only if none is found. A string is a regex."""
    if isinstance(targets, str) or not targets:
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    missing = sorted(target for target in targets if not any(name.endswith(f".{target}") for name in names))
    if missing and len(missing) < len(targets):
        log.warning("lora_target_modules: the model has no module %s; only the others get adapters", ", ".join(missing))


_PEFT_ADVICE = "Please check the target modules and try again"
_SHOWN_NAMES = 12


def _linear_layers(model: nn.Module) -> str:
    """The last parts of their names, in brackets."""
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    shown = list(dict.fromkeys(names))
    return f" ({', '.join(shown[:_SHOWN_NAMES])}{', …' if len(shown) > _SHOWN_NAMES else ''})" if shown else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "").rstrip(". ")


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "adapter: lora needs peft, which is not installed. Run: pip install 'outsize[lora]'"
        ) from None
    return peft
