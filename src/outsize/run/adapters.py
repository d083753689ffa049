"""What `adapter:` says: LoRA adapters for a model, whose weights may still be unmaterialized, or OSFT."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.config.run import RunConfig
from outsize.lora.fuse import PARTS
from outsize.methods.osft.method import OSFT
from outsize.model.adapter import Adapter, add_adapter, lora, saved_lora
from outsize.model.build import Built, absolute_if_local
from outsize.model.parts import named_parts
from outsize.model.weights import Weights, is_unmaterialized


def adapt(built: Built, config: RunConfig) -> Built:
    """Wrap the model in a PEFT model. The base keeps its parameters, under PEFT's names."""
    adapter = adapter_of(config, built.model.config.is_encoder_decoder)  # type: ignore[union-attr, arg-type]
    saved = tuple(adapter.peft_config.modules_to_save or ())
    paths = [path for path, _ in built.model.named_modules()]
    missing = [name for name in saved if not any(path.endswith(name) for path in paths)]
    if missing:  # PEFT ignores them silently
        raise ConfigError(f"lora_modules_to_save: the model has no module {', '.join(missing)}. Correct or remove it.")
    if built.weights is not None:
        # DoRA starts from the norms of the base weights; modules_to_save are copied. Both need values now.
        _fill(built.model, built.weights, ends=("",) if adapter.peft_config.use_dora else saved)
    before = {id(part): name for name, part in named_parts(built.model)}
    model = add_adapter(built.model, adapter)
    adapter.peft_config.base_model_name_or_path = absolute_if_local(config.base_model)
    if built.weights is None or not any(is_unmaterialized(param) for param in model.parameters()):
        return Built(model, None)
    after = {name: before[id(part)] for name, part in named_parts(model) if id(part) in before}
    return Built(model, _Renamed(built.weights, after))


def adapter_of(config: RunConfig, is_encoder_decoder: bool = False) -> Adapter:
    """The adapter that the config describes."""
    kernels = {"mlp": config.lora_mlp_kernel, "qkv": config.lora_qkv_kernel, "o": config.lora_o_kernel}
    fused = tuple(part for part in PARTS if kernels[part])
    if config.lora_model_dir is not None:
        return saved_lora(config.lora_model_dir, fp32=config.lora_fp32, fused=fused)
    given = config.lora_target_modules
    targets = given if isinstance(given, str) else list(given)  # PEFT takes a string as a regex
    return lora(
        fp32=config.lora_fp32,
        fused=fused,
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if config.lora_target_linear else targets,
        modules_to_save=list(config.lora_modules_to_save) or None,
        use_rslora=config.peft_use_rslora,
        use_dora=config.peft_use_dora,
        task_type="SEQ_2_SEQ_LM" if is_encoder_decoder else "CAUSAL_LM",
    )


def materialize(built: Built) -> nn.Module:
    """The model with its weights in host memory."""
    if built.weights is not None:
        _fill(built.model, built.weights, ends=("",))
        built.weights.close()
    return built.model


def materialize_head(built: Built) -> nn.Module:
    """The model with the weights of its output embedding in host memory, and no others if they are in files."""
    model: Any = built.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if built.weights is not None:
        if isinstance(head, nn.Module):
            _fill_parts(model, built.weights, {id(part) for _, part in named_parts(head)})
        built.weights.close()
    return built.model


def method_of(config: RunConfig) -> OSFT | None:
    """The method that the config describes."""
    if config.adapter != "osft":
        return None
    rank = config.osft_effective_rank
    return OSFT(
        unfreeze_rank_ratio=config.osft_unfreeze_rank_ratio,
        effective_rank=None if rank is None else _share_or_count(rank),
        target_modules=config.osft_target_modules,
        rank_pattern={name: _share_or_count(value) for name, value in (config.osft_rank_pattern or {}).items()},
        others=config.osft_others,
    )


def _share_or_count(value: float) -> float | int:
    """A number of a config is a float: up to 1 a share, above it a count."""
    return int(value) if value > 1 and value == int(value) else value


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
        {id(part) for path, module in model.named_modules() if path.endswith(ends) for _, part in named_parts(module)}
        if ends
        else set()
    )
    _fill_parts(model, weights, wanted)


def _fill_parts(model: nn.Module, weights: Weights, wanted: AbstractSet[int]) -> None:
    """`wanted`: ids of parts."""
    with torch.no_grad():
        for name, part in named_parts(model):
            if id(part) in wanted and is_unmaterialized(part):
                data = torch.empty(part.shape, dtype=part.dtype)
                weights.read_into(name, data)
                part.data = data
