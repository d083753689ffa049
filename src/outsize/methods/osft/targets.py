"""Which weights of a model OSFT splits, and which other parameters train."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.base.log import log
from outsize.methods.osft.method import OSFT
from outsize.methods.osft.shape import SplitShape


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    """Of the parameter."""
    shape: SplitShape

    @property
    def update(self) -> Literal["frozen", "whole", "split"]:
        """`frozen`: all directions are frozen. `whole`: all are free, so the weight trains as without OSFT."""
        if not self.shape.rank:
            return "frozen"
        return "split" if self.shape.frozen_rank else "whole"


def find_targets(model: nn.Module, method: OSFT) -> tuple[Target, ...]:
    """The trainable weights of linear modules that the method names, in the model's order. Refuses quantized ones.

    A weight that several modules share counts once. Without `target_modules`, weights that an embedding or the output
    head shares are no targets.
    """
    if getattr(model, "peft_config", None):
        raise ConfigError("OSFT: the model has a PEFT adapter, which leaves no weights to split. Use one or the other.")
    if method.target_modules is None and getattr(model, "is_quantized", False):
        kind = getattr(getattr(model, "quantization_method", None), "value", "unknown")
        raise ModelUnsupported(f"OSFT: the model is quantized ({kind}). Use the unquantized model.")
    _require_gradients_are_ours(model)
    names = {id(param): name for name, param in model.named_parameters()}
    heads = set() if method.target_modules is not None else _embeddings(model)
    found: dict[str, Target] = {}
    linear = []
    for module_name, module in model.named_modules():
        is_transposed = _is_conv1d(module)
        weight = module._parameters.get("weight") if is_transposed or isinstance(module, nn.Linear) else None
        if weight is None:
            continue
        linear.append(module_name)
        if not method.is_target(module_name) or id(weight) in heads:
            continue
        _require_plain(module_name, weight)
        if weight.requires_grad and weight.dim() == 2 and weight.numel():
            name = names[id(weight)]
            found.setdefault(name, Target(name, method.shape(module_name, *weight.shape, is_transposed=is_transposed)))
    if not found:
        named = "" if method.target_modules is None else f" that target_modules={method.target_modules!r} names"
        regular = " A string is a regular expression for whole names." if isinstance(method.target_modules, str) else ""
        raise ConfigError(
            f"OSFT: the model has no trainable linear weight{named}.{regular} Name linear modules of the model in "
            "target_modules, such as q_proj in a list, and unfreeze their weights."
        )
    _require_all_names_found(method, linear, [name for name, _ in model.named_modules()])
    return tuple(found.values())


def _require_all_names_found(method: OSFT, linear: Sequence[str], modules: Sequence[str]) -> None:
    """Refuse names that match nothing: a misspelled one would leave weights to train in all directions."""
    if unknown := method.unknown_targets(linear):
        raise ConfigError(
            f"OSFT: target_modules names {', '.join(unknown)}, which is no linear module of the model (nor the end of "
            "its name). Correct or remove it; a regular expression, given as a string, can name all linear modules "
            "within another."
        )
    if unknown := method.unknown_patterns(modules):
        raise ConfigError(
            f"OSFT: rank_pattern has {', '.join(map(repr, unknown))}, which no module's name contains. Correct or "
            "remove it."
        )


def _require_gradients_are_ours(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ModelUnsupported(
                "OSFT: the model is wrapped in DistributedDataParallel, which would average gradients after the "
                "optimizer has taken them. Train in one process, or use fully_shard with parametrization='factors'."
            )


def choose_trainable(model: nn.Module, method: OSFT, targets: Sequence[Target]) -> None:
    """Set `requires_grad`: off for frozen targets and for what `method.others` leaves out. Nothing is unfrozen."""
    updates = {target.name: target.update for target in targets}
    norms = {id(p) for module in model.modules() if _is_norm(module) for p in module.parameters(recurse=False)}
    others = method.trains_others
    for name, param in model.named_parameters():
        trains = others == "train" or (others == "norms" and id(param) in norms)
        if not (updates[name] != "frozen" if name in updates else trains):
            param.requires_grad_(False)
    whole = [name for name, param in model.named_parameters() if param.requires_grad and param.dim() == 3]
    if whole:
        log.warning(
            "OSFT: %s and %d more weights of three dimensions (such as experts) are not split: they train in all "
            "directions. Set others='norms' or 'freeze' to leave them as they are.",
            whole[0],
            len(whole) - 1,
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            f"OSFT: there is nothing to train: all directions are frozen, and so are all others (others={others!r}). "
            "Raise unfreeze_rank_ratio, or set others='train'."
        )


def _require_plain(module: str, weight: Tensor) -> None:
    if hasattr(weight, "__tensor_flatten__") and type(weight).__name__ != "DTensor":
        raise ModelUnsupported(
            f"OSFT: {module}.weight is a {type(weight).__name__}, which keeps its values in other tensors, as "
            "quantized weights do. Use the unquantized model."
        )
    if weight.dtype not in (torch.bfloat16, torch.float32):
        dtype = str(weight.dtype).removeprefix("torch.")
        is_plain = weight.dtype in (torch.float16, torch.float64)
        do = "Convert the model with .to(torch.bfloat16)" if is_plain else "Use the unquantized model"
        raise ModelUnsupported(f"OSFT: {module}.weight is {dtype}; only bf16 and fp32 weights can be split. {do}.")


def _embeddings(model: nn.Module) -> set[int]:
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return {id(table) for table in (*tables, getattr(head, "weight", None)) if table is not None}


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, whose weight is (inputs, outputs)."""
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
