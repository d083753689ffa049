"""Ranks by layer, as the paper of OSFT chooses them (arXiv 2504.07097): a layer whose output is more like its input
keeps more directions.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from outsize.base.errors import ConfigError


@torch.no_grad()
def adaptive_ranks(
    model: nn.Module, batch: Mapping[str, Any], unfreeze_rank_ratio: float, *, least_frozen: float = 0.1
) -> dict[str, float]:
    """A `rank_pattern` for `OSFT(unfreeze_rank_ratio=...)`, from one forward of the model on `batch`.

    With s the mean cosine similarity of a layer's input and output, and s̄ its mean over layers, a layer's frozen share
    is `least_frozen` + s/s̄ · (1 - `unfreeze_rank_ratio` - `least_frozen`), at most 1. Its mean over layers is 1 -
    `unfreeze_rank_ratio`.
    """
    if not 0 <= least_frozen <= 1 - unfreeze_rank_ratio <= 1:
        raise ConfigError(
            f"least_frozen={least_frozen} and unfreeze_rank_ratio={unfreeze_rank_ratio} cannot both hold: the mean "
            f"frozen share is {1 - unfreeze_rank_ratio:g}. Lower one of them."
        )
    stacks = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not stacks:
        raise ConfigError("adaptive_ranks: the model has no nn.ModuleList of layers. Set rank_pattern by hand.")
    prefix, layers = max(stacks, key=lambda stack: sum(p.numel() for p in stack[1].parameters()))
    found: list[list[Tensor]] = [[] for _ in layers]

    def measure(number: int, into: list[Tensor]) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            before = args[0] if args else kwargs.get("hidden_states")
            after = output[0] if isinstance(output, tuple) else output
            if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.shape != after.shape:
                raise ConfigError(
                    f"adaptive_ranks: the output of {prefix}.{number} has another shape than its input, so they cannot "
                    "be compared. Set rank_pattern by hand."
                )
            into.append(cosine_similarity(before.float(), after.float(), dim=-1).mean())

        return hook

    hooks = [layer.register_forward_hook(measure(i, found[i]), with_kwargs=True) for i, layer in enumerate(layers)]
    was_training = model.training
    try:
        model.eval()(**batch)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if (idle := [i for i, values in enumerate(found) if not values]) or not layers:
        raise ConfigError(
            f"adaptive_ranks: {prefix}.{idle[0] if idle else 0} did not run on this batch. Set rank_pattern by hand."
        )
    similarity = torch.stack([torch.stack(values).mean() for values in found])
    if not similarity.mean() > 0:
        raise ConfigError(
            f"adaptive_ranks: the mean similarity of the layers' inputs and outputs is {float(similarity.mean()):.3g}, "
            "so shares of it say nothing. Set rank_pattern by hand."
        )
    shares = least_frozen + similarity / similarity.mean() * (1 - unfreeze_rank_ratio - least_frozen)
    return {"^" + re.escape(f"{prefix}.{i}."): 1 - float(share.clamp(0, 1)) for i, share in enumerate(shares)}
