"""Attention of packed rows without a mask: each document of a row attends to itself alone.

Under `sdpa`, transformers builds a mask of tokens × tokens for a row of several documents, which excludes flash
kernels. This attention function takes the offsets of the documents instead. They are arguments of the model, made by
the collator, and reach every layer as keyword arguments: nothing is computed from `position_ids`, and no layer syncs
the host. On a GPU `torch.nn.attention.varlen` computes all documents in one kernel. On the CPU one operator runs
`sdpa`'s own kernel per document, with the bits that attention has for each document alone.

The function has the contract of transformers' flash functions: no mask, causal, windows by `sliding_window`.
"""

import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import register_flop_formula

from outsize.base.errors import ModelUnsupported
from outsize.compat import fake_tensor

VARLEN = "outsize_varlen"
"""The name of the function as a value of `attn_implementation`."""
BOUNDARIES = ("document_offsets", "longest_document")
"""Arguments of a model's forward that it passes on to this attention (data/packing.py makes them)."""
_MOST_HEAD_DIM = 256
_INSTEAD = "Set attn_implementation: sdpa"
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""torch 2.11 has no such argument, and takes fewer heads of keys as they are."""


@cache
def register() -> None:
    """Add the function to transformers. It has no counterpart that makes masks: transformers then builds none."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, _attention)


def why_masked(kind: Any, config: Any, *, on_gpu: bool) -> str:
    """Why packed rows of a model need a mask, as part of a sentence. Empty if they do not."""
    text = config.get_text_config()
    layers = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    dropout = [name for name in ("attention_dropout", "attn_pdrop") if getattr(text, name, 0)]
    if getattr(text, "attn_logit_softcapping", None):
        return "its attention scores are capped (attn_logit_softcapping)"
    if not (kind._supports_sdpa and kind._supports_flash_attn and kind._supports_attention_backend):
        return "its attention has sinks, biases or a form of its own"
    if layers:
        return f"it has layers of {', '.join(sorted(layers))}"
    if dropout:
        return f"its attention has dropout ({dropout[0]})"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if getattr(text, "v_head_dim", head_dim) != getattr(text, "qk_head_dim", head_dim):
        return "its values have another head dimension than its queries"
    if on_gpu and (head_dim > _MOST_HEAD_DIM or head_dim % 8):
        return f"its head dimension is {head_dim}"
    return ""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    document_offsets: Tensor | None = None,
    longest_document: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query, key, value: (rows, heads, tokens, head_dim). Returns (rows, tokens, heads, head_dim)."""
    rows, _, tokens, head_dim = query.shape
    wrong = [name for name in ("softcap", "s_aux", "position_bias", "cache") if others.get(name) is not None]
    wrong += ["attention_mask"] if attention_mask is not None else []
    wrong += [f"dropout {dropout}"] if dropout else []
    wrong += ["attention in both directions"] if not getattr(module, "is_causal", True) or is_causal is False else []
    wrong += ["no document_offsets"] if document_offsets is None or longest_document is None else []
    wrong += ["a key-value cache"] if key.shape[2] != tokens else []
    if wrong or document_offsets is None or longest_document is None:
        raise ModelUnsupported(
            f"attn_implementation: {VARLEN} was called by {type(module).__name__} with {', '.join(wrong)}. {_INSTEAD}."
        )
    # Rows that were cut to fewer tokens, as for profiling, have offsets behind their end.
    offsets = document_offsets.clamp(max=tokens)
    if rows > 1:
        offsets = offsets + torch.arange(0, rows * tokens, tokens, dtype=torch.int32, device=offsets.device)[:, None]
    query, key, value = (part.transpose(1, 2).reshape(rows * tokens, -1, head_dim) for part in (query, key, value))
    scale = head_dim**-0.5 if scaling is None else scaling
    given = query, key, value, offsets.flatten(), min(longest_document, tokens), sliding_window or 0, scale
    out = packed_attention(*given)[0] if query.device.type == "cpu" else _varlen(*given)
    return out.view(rows, tokens, *out.shape[1:]), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, window: int, scale: float
) -> Tensor:
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ModelUnsupported(f"attn_implementation: {VARLEN} computes {query.dtype} on the CPU only. {_INSTEAD}.")
    around = (window - 1 if window else -1, 0)
    out = varlen_attn(
        query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=around, **_GROUPED
    )
    assert isinstance(out, Tensor)
    return out


# --- the operator of the CPU: as one operator it saves the same tensors for every number of documents, as `varlen` does

_aten = torch.ops.aten


@torch.library.custom_op("outsize::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """query, key, value: (tokens, heads, head_dim). Returns the result and the log-sum-exp (tokens, heads)."""
    out, log_sum_exp = (torch.zeros_like(part) for part in _fake(query, key, value, offsets))
    for part in _documents(offsets):
        given = [_alone(tensor, part) for tensor in (query, key, value)]
        mask = _window_mask(given[0], window)
        found, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        out[part], log_sum_exp[part] = found[0].transpose(0, 1), sums[0].transpose(0, 1)
    return out, log_sum_exp


@packed_attention.register_fake
def _fake(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=sums)


@torch.library.custom_op("outsize::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in (query, key, value)]
    for part in _documents(offsets):
        mask = _window_mask(_alone(query, part), window)
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_alone(tensor, part) for tensor in (grad, query, key, value, out)),
            log_sum_exp[part].transpose(0, 1)[None],
            0.0,
            mask is None,
            attn_mask=mask,
            scale=scale,
        )
        for whole, one in zip(grads, found, strict=True):
            whole[part] = one[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


@packed_attention_backward.register_fake
def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = packed_attention_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.window, ctx.scale)
    return (*grads, None, None, None, None)


packed_attention.register_autograd(_backward, setup_context=_save)


def _documents(offsets: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(offsets.tolist()) if end > start]


def _alone(tensor: Tensor, document: slice) -> Tensor:
    """(1, heads, tokens, head_dim), as `sdpa` has it."""
    return tensor[document].transpose(0, 1)[None]


def _window_mask(query: Tensor, window: int) -> Tensor | None:
    """The mask that transformers makes for a document that is at least as long as the window."""
    tokens = query.shape[2]
    if not window or tokens < window:
        return None
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)
    return torch.zeros(tokens, tokens, dtype=query.dtype).masked_fill_(~seen, -torch.inf)


def _flops(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, window: int, *_: Any, **__: Any
) -> float:
    """Kernels skip what is masked: half of a document, or all but the window."""
    if isinstance(offsets, fake_tensor.FakeTensor):  # it has no values: documents are as long as the longest
        lengths = [longest] * (len(query) // longest)
    else:
        lengths = [part.stop - part.start for part in _documents(offsets)]
    pairs = sum(length * min(length / 2, window or length) for length in lengths)
    return 2.0 * pairs * query.shape[1] * (query.shape[2] + value.shape[2])


def _backward_flops(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    out: Tensor,
    sums: Tensor,
    *others: Any,
    **_: Any,
) -> float:
    """Five matrix products, two in forward."""
    return 2.5 * _flops(query, key, value, offsets, *others)


register_flop_formula(torch.ops.outsize.packed_attention, get_raw=True)(_flops)
register_flop_formula(torch.ops.outsize.packed_attention_backward, get_raw=True)(_backward_flops)
