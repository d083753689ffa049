"""Tiny pruned models, and the same built in another way: the plain class of transformers with zeroed output projections
and repeated key/value heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outsize.methods.bypass.pruned_config import LayerChange, PartPlace, pruned_config
from outsize.model.pruned import pruned_class

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ("llama", "qwen3", "qwen2", "mistral", "gemma3_text")
_WINDOWS = {"gemma3_text": {"sliding_window": 6, "layer_types": (["sliding_attention", "full_attention"] * 3)[:5]}}

CHANGES = {
    0: LayerChange(skip=frozenset({"attention"})),
    1: LayerChange({"num_key_value_heads": 2, "intermediate_size": 32}),
    2: LayerChange(skip=frozenset({"mlp"})),
    3: LayerChange({"intermediate_size": 48}, linear=frozenset({"attention"})),
    4: LayerChange(skip=frozenset({"attention", "mlp"})),
}


def parts(kind: str) -> dict[Any, PartPlace]:
    norms = (("input_layernorm",), ("post_attention_layernorm",))
    if kind == "gemma3_text":
        norms = (
            ("input_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    return {"attention": PartPlace("self_attn", norms[0], 2), "mlp": PartPlace("mlp", norms[1], 0)}


def teacher_config(kind: str, *, tied: bool = True) -> Any:
    return AutoConfig.for_model(kind, **SMALL, **_WINDOWS.get(kind, {}), tie_word_embeddings=tied)


@dataclass
class Pair:
    pruned: Any
    plain: nn.Module
    """The plain class with the same values, except for layers with a linear part, which has none."""


def pair(kind: str, dtype: torch.dtype = torch.float64, changes: Any = CHANGES, tied: bool = True) -> Pair:
    torch.manual_seed(0)
    config = teacher_config(kind, tied=tied)
    plain = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    for index, change in changes.items():
        _reduce(plain.model.layers[index], change)
    own = pruned_class(pruned_config(config, type(plain), "model.layers", parts(kind), changes))
    pruned = own(pruned_config(config, type(plain), "model.layers", parts(kind), changes)).to(dtype).eval()
    pruned.load_state_dict(_narrowed(plain.state_dict(), pruned.state_dict()))
    return Pair(pruned, plain)


def _reduce(layer: Any, change: LayerChange) -> None:
    """Zero what the pruned layer lacks, and let heads share what they share there."""
    if width := change.sizes.get("intermediate_size"):
        layer.mlp.down_proj.weight.data[:, width:] = 0
    if kept := change.sizes.get("num_key_value_heads"):
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for tensor in (projection.weight, projection.bias):
                if tensor is not None:
                    heads = tensor.data.view(kept, 4 // kept, 16, -1)
                    heads[:] = heads[:, :1].clone()
    if "mlp" in change.skip:
        layer.mlp.down_proj.weight.data.zero_()
    if "attention" in change.skip:
        layer.self_attn.o_proj.weight.data.zero_()
    if "attention" in change.linear:
        # Attention to the own position only is a linear map; the test compares it where that is so: one token.
        pass


def _narrowed(plain: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {}
    for name, target in like.items():
        if name.endswith("self_attn.linear.weight"):
            prefix = name.removesuffix("linear.weight")
            made[name] = plain[f"{prefix}o_proj.weight"] @ plain[f"{prefix}v_proj.weight"]
            continue
        value = plain[name]
        if value.shape != target.shape:
            if "k_proj" in name or "v_proj" in name:
                heads = target.shape[0] // 16
                value = value.view(heads, 4 // heads, 16, *value.shape[1:])[:, 0].reshape(target.shape)
            else:
                value = value[tuple(slice(0, size) for size in target.shape)]
        made[name] = value.clone()
    return made
