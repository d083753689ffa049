"""Which attention kernels a model runs, and on a GPU how long the others would take for its shapes."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.base.errors import DeviceOutOfMemory
from outsize.device.device import Device
from outsize.device.sdp_kernel import only_kernel

_NAMES = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "torch_attn::_varlen_attn": "varlen_attn",
    "outsize::packed_attention": "outsize's packed attention",
}
"""By operator. The first four are kernels of SDPA."""
_OF_SDPA = ("flash", "cudnn", "efficient")
MOST_TOKENS = 16_384
"""Longer rows are timed at this length: kernels differ by about the same factor there."""
_MOST_CALLS = 4
_REPETITIONS = 2
_CLEARLY_FASTER = 0.95


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What decides the time of an attention operator."""

    kernel: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    is_causal: bool
    has_mask: bool
    scale: float | None

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Mapping[str, Any]) -> "AttentionCall":
        name = func._schema.name
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        tensors = [value for value in given.values() if isinstance(value, Tensor)][:3]
        mask = given.get("attn_bias", given.get("attn_mask"))
        query, key, value = (tuple(map(int, tensor.shape)) for tensor in tensors)
        return cls(
            _NAMES.get(name, "flash-attn" if "flash_attn" in name else name.split("::")[1]),
            query,
            key,
            value,
            tensors[0].dtype,
            bool(given.get("is_causal", False)),
            mask is not None,
            given.get("scale"),
        )


def kernels_text(
    calls: Mapping[AttentionCall, int], seconds_of: Callable[[AttentionCall, str], float | None] | None = None
) -> str:
    """The kernels of these calls, and what other kernels of SDPA would change. Empty without a call.

    `calls`: with their number. `seconds_of(call, kernel)` times a kernel; None: the others are not timed.
    """
    numbers: Counter[str] = Counter()
    for call, number in calls.items():
        numbers[call.kernel] += number
    names = [name for name, _ in numbers.most_common()]
    text = " and ".join(names)
    if seconds_of is None or not text:
        return text
    timed = [call for call in sorted(calls, key=_size, reverse=True) if call.kernel in _OF_SDPA and not call.has_mask]
    now, others = 0.0, dict.fromkeys(_OF_SDPA, 0.0)
    for call in timed[:_MOST_CALLS]:
        seconds = {name: seconds_of(call, name) for name in _OF_SDPA}
        if (own := seconds[call.kernel]) is None:
            continue
        now += own * calls[call]
        for name in [*others]:
            if (found := seconds[name]) is None:
                others.pop(name)
            else:
                others[name] += found * calls[call]
    if not now:
        return text
    ratios = {name: total / now for name, total in others.items() if name not in names}
    compared = [f"{name} takes {ratio:.2f} x as long" for name, ratio in ratios.items()]
    best = min(ratios, key=lambda name: ratios[name], default="")
    advice = f" (sdp_kernel: {best} would be faster)" if best and ratios[best] < _CLEARLY_FASTER else ""
    return "; ".join([text, *([", ".join(compared) + advice] if compared else [])])


def timed_on(device: Device, call: AttentionCall, kernel: str) -> float | None:
    """Seconds of a forward and a backward. None if the kernel cannot compute it here."""
    try:
        with only_kernel(kernel), torch.enable_grad():
            return _seconds(call, device)
    except (RuntimeError, DeviceOutOfMemory):  # no kernel for these shapes, or not enough memory
        return None


def _seconds(call: AttentionCall, device: Device) -> float:
    query, key, value = (
        torch.zeros(
            (*shape[:-2], min(shape[-2], MOST_TOKENS), shape[-1]),
            dtype=call.dtype,
            device=device.torch_device,
            requires_grad=True,
        )
        for shape in (call.query, call.key, call.value)
    )
    grouped = call.query[1] != call.key[1]
    start: Any = None
    for number in range(1 + _REPETITIONS):
        if number == 1:
            device.synchronize()
            start = device.mark()
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=grouped
        )
        torch.autograd.grad(out, (query, key, value), out)
    return device.between(start, device.mark()) / _REPETITIONS


def _size(call: AttentionCall) -> int:
    rows, heads, tokens, width = call.query if len(call.query) == 4 else (1, 1, 1, 1)
    return rows * heads * tokens * tokens * width
