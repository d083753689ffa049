"""Adds a PEFT adapter to a model."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    peft_config: Any
    """A config of PEFT, such as LoraConfig."""
    fp32: bool = False
    """PEFT's default: adapter weights in fp32 over a bf16 base. False: in the base's dtype."""


def lora(*, fp32: bool = False, **settings: Any) -> Adapter:
    """LoRA, by default on all linear layers except the output head. `settings`: of LoraConfig."""
    return Adapter(peft_config=_peft().LoraConfig(**{"target_modules": "all-linear", **settings}), fp32=fp32)


def add_adapter(model: nn.Module, adapter: Adapter, **settings: Any) -> nn.Module:
    """Wrap the model in a PEFT model. `settings`: of `get_peft_model`."""
    make = _peft().get_peft_model
    try:
        wrapped: nn.Module = make(model, adapter.peft_config, autocast_adapter_dtype=adapter.fp32, **settings)
        return wrapped
    except ValueError as error:
        line = next(iter(str(error).strip().splitlines()), "").rstrip(". ")
        raise ConfigError(
            f"lora_target_modules: {line}. Name linear layers of the model, or use lora_target_linear: true."
        ) from None


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "adapter: lora needs peft, which is not installed. Run: pip install 'outsize[lora]'"
        ) from None
    return peft
