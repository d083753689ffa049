"""Adds LoRA adapters to a model, whose weights may still be unmaterialized."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.config.run import RunConfig
from outsize.model.build import Built
from outsize.model.weights import Weights, is_unmaterialized
from outsize.run.compat_checks import first_line


def adapt(built: Built, config: RunConfig) -> Built:
    """Wrap the model in a PEFT model. The base keeps its parameters, under PEFT's names."""
    peft = _peft()
    paths = [path for path, _ in built.model.named_modules()]
    missing = [name for name in config.lora_modules_to_save if not any(path.endswith(name) for path in paths)]
    if missing:  # PEFT ignores them silently
        raise ConfigError(f"lora_modules_to_save: the model has no module {', '.join(missing)}. Correct or remove it.")
    if built.weights is not None:
        # DoRA starts from the norms of the base weights; modules_to_save are copied. Both need values now.
        _fill(built.model, built.weights, ends=("",) if config.peft_use_dora else config.lora_modules_to_save)
    before = {id(param): name for name, param in built.model.named_parameters()}
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if config.lora_target_linear else list(config.lora_target_modules),
        modules_to_save=list(config.lora_modules_to_save) or None,
        use_rslora=config.peft_use_rslora,
        use_dora=config.peft_use_dora,
        task_type="SEQ_2_SEQ_LM" if built.model.config.is_encoder_decoder else "CAUSAL_LM",  # type: ignore[union-attr]
    )
    try:
        model = peft.get_peft_model(built.model, settings, autocast_adapter_dtype=config.lora_fp32)
    except ValueError as error:
        raise ConfigError(
            f"lora_target_modules: {first_line(error)}. Name linear layers of the model, or use lora_target_linear: "
            "true."
        ) from None
    if built.weights is None or not any(is_unmaterialized(param) for param in model.parameters()):
        return Built(model, None)
    after = {name: before[id(param)] for name, param in model.named_parameters() if id(param) in before}
    return Built(model, _Renamed(built.weights, after))


@dataclass(frozen=True, slots=True)
class _Renamed:
    weights: Weights
    old: Mapping[str, str]

    def read_into(self, name: str, tensor: Tensor) -> None:
        self.weights.read_into(self.old[name], tensor)

    def close(self) -> None:
        self.weights.close()


def _fill(model: nn.Module, weights: Weights, *, ends: tuple[str, ...]) -> None:
    """Materialize the parameters of modules whose path ends with one of `ends`."""
    wanted = (
        {id(param) for path, module in model.named_modules() if path.endswith(ends) for param in module.parameters()}
        if ends
        else set()
    )
    for name, param in model.named_parameters():
        if id(param) in wanted and is_unmaterialized(param):
            data = torch.empty(param.shape, dtype=param.dtype)
            weights.read_into(name, data)
            param.data = data


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "adapter: lora needs peft, which is not installed. Run: pip install 'outsize[lora]'"
        ) from None
    return peft
