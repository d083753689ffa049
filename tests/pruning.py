"""Teachers in fp64 with biases wherever their class has some, and their layers inspected, for the tests of pruning."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from kinds.text import DECODERS
from torch import Tensor, nn

from outsize.methods.bypass.builder import build_student
from outsize.methods.bypass.importance import LayerImportance
from outsize.methods.bypass.layouts import inspect_layer
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.students import Student
from outsize.methods.bypass.subblocks import SubBlockRun, record
from outsize.methods.bypass.variants import Change, Variant
from outsize.model.stack import LayerStack, run

_LLAMA: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
)


def _llama() -> nn.Module:
    """Biases everywhere."""
    config = transformers.LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True)
    return transformers.LlamaForCausalLM(config)


def _qwen3() -> nn.Module:
    """Norms of queries and keys."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LLAMA, attention_bias=True))


OWN = {"llama": _llama, "qwen3": _qwen3}


def teacher(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = OWN[kind]() if kind in OWN else DECODERS[kind].make()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped products in fp64
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))  # biases that are zeros, small matrices
    return model.to(dtype).eval()


def layers(model: nn.Module, seed: int = 0) -> Iterator[tuple[LayerParts, Any, Tensor]]:
    """Each layer with its call and hidden state."""
    stack = LayerStack(model)
    captured = stack.capture(
        {"input_ids": torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(seed))}
    )
    hidden = captured.hidden
    for layer, call in zip(stack.layers, captured.calls, strict=True):
        yield inspect_layer(layer.name, layer.module, stack.config, call, hidden), call, hidden
        with torch.no_grad():
            hidden = run(layer.module, call, hidden)


def first_layer(model: nn.Module) -> tuple[LayerParts, dict[str, SubBlockRun]]:
    """The first layer, and what its sub-blocks and itself are given."""
    parts, call, hidden = next(layers(model))
    _, runs = record(parts.layer, parts.subblocks, [*parts.subblocks, "block"], call, hidden)
    return parts, runs


def variant(kind: Any, count: int | None = None, subblock: str | None = None, how: Any = None) -> Variant:
    subblock = subblock or ("attention" if kind in ("num_key_value_heads", "linear") else "ffn")
    how = how or ("average" if kind == "num_key_value_heads" else None)
    return Variant(learn=subblock, changes=(Change(subblock=subblock, kind=kind, count=count, how=how),))


def student(parts: LayerParts, given: Variant, importance: LayerImportance | None = None) -> Student:
    return build_student(parts, given, importance)


def require_close(left: Tensor, right: Tensor, tolerance: float = 1e-10) -> None:
    assert left.shape == right.shape
    assert (left - right).abs().max() <= tolerance * right.abs().max(), (left - right).abs().max() / right.abs().max()
