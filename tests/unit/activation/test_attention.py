"""Attention computed once: bits and random numbers of a recomputed layer, kernels counted below autograd."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.activation import attention
from outsize.activation.attention import is_attention, saves_attention
from outsize.activation.strategies import offload, offload_save_attention, recompute, recompute_save_attention
from outsize.base.units import ALIGN_BYTES
from outsize.compat import current_dispatch_modes
from outsize.model.packed_attention import packed_attention
from outsize.transfer.offloaded_tensors import OffloadedTensors

WIDTH, HEADS, TOKENS = 32, 4, 24
SAVING = {"recompute": recompute_save_attention, "offload": offload_save_attention}
BOTH = pytest.mark.parametrize("kind", list(SAVING))


class Counting(TorchDispatchMode):
    """How often each attention operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func):
            self.runs[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.compute = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), compute

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        parts = self.qkv(x).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.compute(*parts).transpose(1, 2).reshape(rows, tokens, WIDTH))


class Layer(nn.Module):
    def __init__(self, compute: Callable[..., Tensor], dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(compute)
        self.mlp, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.mlp(x).relu())


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v) + F.scaled_dot_product_attention(k, q, v)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, heads, tokens, dim = q.shape
    flat = [part.transpose(1, 2).reshape(rows * tokens, heads, dim) for part in (q, k, v)]
    offsets = torch.tensor([0, 7, 24, 40, 48], dtype=torch.int32)
    return packed_attention(*flat, offsets, 17, 0, dim**-0.5)[0].view(rows, tokens, heads, dim).transpose(1, 2)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


_library = torch.library.Library("flash_attn_tests", "DEF")
_library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p) -> Tensor[]")
_library.define("fwd(Tensor q, Tensor k, Tensor v, Tensor(a!)? out) -> Tensor[]")


@torch.library.impl(_library, "_flash_attn_forward", "CPU")
def _as_flash_attn(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> list[Tensor]:
    return list(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))


class FlashAttn(torch.autograd.Function):
    """Calls its operator in a node of its own, as the package flash-attn does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        out, sums = torch.ops.flash_attn_tests._flash_attn_forward(q, k, v, dropout)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return *back(grad, *saved, 0.0, False), None


def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FlashAttn.apply(q, k, v, 0.0)


def flash_attn_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FlashAttn.apply(q, k, v, 0.1)


KNOWN = {"sdpa": sdpa, "twice": twice, "packed": packed, "flash_attn": flash_attn}


class Found:
    def __init__(
        self,
        layer: nn.Module,
        run: Callable[..., Any],
        corrupt: Callable[[Tensor], object] = lambda arena: None,
        backwards: int = 1,
    ):
        layer.zero_grad()
        torch.manual_seed(3)
        x = torch.randn(2, TOKENS, WIDTH, dtype=layer.norm.weight.dtype, requires_grad=True)
        self.offloaded = offloaded = OffloadedTensors()
        counting = Counting()
        with counting:
            out = run(layer.forward, (x * 1.0,), {}, offloaded, lambda t: False, layer)
            if offloaded.num_bytes:
                arena = torch.empty(offloaded.num_bytes, dtype=torch.uint8)
                offloaded.copy_to(arena)
                offloaded.free_device_copy()
                corrupt(arena)
                offloaded.attach_buffer(arena)
            for number in range(backwards):
                out.float().square().sum().backward(retain_graph=number + 1 < backwards)
        self.runs = dict(counting.runs)
        self.tensors = [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters()), torch.rand(4)]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Found)
        return all(torch.equal(a, b) for a, b in zip(self.tensors, other.tensors, strict=True))


def layer_with(compute: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Layer:
    torch.manual_seed(0)
    return Layer(compute).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(KNOWN))
def test_attention_runs_once_and_the_bits_are_those_of_recomputing(name: str, kind: str, dtype: torch.dtype) -> None:
    layer = layer_with(KNOWN[name], dtype)
    expected = Found(layer, {"recompute": recompute, "offload": offload}[kind])
    for _ in range(2):  # the first forward finds the modules, the second knows them
        found = Found(layer, SAVING[kind])
        assert found == expected
        assert {name: 2 * runs for name, runs in found.runs.items()} == expected.runs
    assert saves_attention(layer)
    assert attention._modules[layer] == ("attention",)


@BOTH
def test_a_second_backward_runs_attention_again(kind: str) -> None:
    layer = layer_with(sdpa)
    expected = Found(layer, recompute, backwards=2)
    assert Found(layer, SAVING[kind], backwards=2) == expected


@BOTH
@pytest.mark.parametrize("compute", [dropped, flash_attn_dropout, by_hand])
def test_dropout_and_unknown_operators_are_recomputed(compute: Callable[..., Tensor], kind: str) -> None:
    layer = layer_with(compute)
    expected = Found(layer, {"recompute": recompute, "offload": offload}[kind])
    found = Found(layer, SAVING[kind])
    assert found == expected and found.runs == expected.runs
    assert not saves_attention(layer)


def test_the_outputs_are_what_is_offloaded() -> None:
    """The input, the result and the log-sum-exp: nothing else. Gradients depend on both outputs."""
    layer = layer_with(sdpa)
    plain, found = Found(layer, offload), Found(layer, offload_save_attention)
    hidden, sums = 2 * TOKENS * WIDTH * 4, 2 * TOKENS * HEADS * 4
    assert plain.offloaded.num_bytes == hidden
    assert found.offloaded.num_bytes == 2 * hidden + -(-sums // ALIGN_BYTES) * ALIGN_BYTES
    for start in (hidden, 2 * hidden):
        corrupted = Found(layer, offload_save_attention, lambda arena, start=start: arena[start : start + 64].zero_())
        assert corrupted != found


def test_kept_outputs_decide_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_with(sdpa)
    expected = Found(layer, recompute_save_attention)
    keep = attention._AttentionOutputs._keep
    monkeypatch.setattr(attention._AttentionOutputs, "_keep", lambda *given: keep(*given).clone().mul_(0.5))
    assert Found(layer, recompute_save_attention) != expected


def test_a_layer_that_is_itself_attention_and_an_exception() -> None:
    """The layer's own forward calls attention. An exception leaves modules and modes as they were."""

    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fails = nn.LayerNorm(WIDTH), False

        def forward(self, x: Tensor) -> Tensor:
            q = self.norm(x).view(2, TOKENS, HEADS, -1).transpose(1, 2)
            out = sdpa(q, q, q)
            if self.fails:
                raise RuntimeError("the layer breaks down")
            return x + out.transpose(1, 2).reshape(2, TOKENS, WIDTH)

    layer, modes = Itself(), current_dispatch_modes()
    assert Found(layer, recompute_save_attention) == Found(layer, recompute)
    assert attention._modules[layer] == ("",)
    layer.fails = True
    for case in (layer, layer_with(lambda q, k, v: q.view(3))):
        with pytest.raises(RuntimeError):
            Found(case, recompute_save_attention)
        assert all("forward" not in module.__dict__ for module in case.modules())
    assert current_dispatch_modes() == modes


def test_a_shared_and_a_nested_module_record_once() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(sdpa)

        def forward(self, x: Tensor) -> Tensor:
            q = x.view(2, TOKENS, HEADS, -1).transpose(1, 2)
            return self.inner(x) + sdpa(q, q, q).transpose(1, 2).reshape(2, TOKENS, WIDTH)

    layer = layer_with(sdpa)
    layer.attention = Outer()
    layer.again = layer.attention.inner
    expected = Found(layer, recompute)
    for _ in range(2):
        found = Found(layer, recompute_save_attention)
        assert found == expected and found.runs == {name: runs // 2 for name, runs in expected.runs.items()}


def test_operators_that_write_to_an_argument_are_not_saved() -> None:
    fwd = torch.ops.flash_attn_tests.fwd.default
    q = torch.ones(2)
    assert is_attention(fwd)
    assert attention._is_repeatable(fwd, (q, q, q, None), {})
    assert not attention._is_repeatable(fwd, (q, q, q), {"out": q})


def test_the_operators_of_torch_exist() -> None:
    for name in attention._OPERATORS:
        namespace, _, operator = name.partition("::")
        assert is_attention(getattr(getattr(torch.ops, namespace), operator).default), name
    assert not is_attention(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
