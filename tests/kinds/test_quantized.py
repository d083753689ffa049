"""Quantized models that outsize does not train are refused by name, with what to do instead."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.base.errors import ModelUnsupported
from outsize.reference import AdamW as Reference

bnb = pytest.importorskip("bitsandbytes")


class QuantLinear(nn.Module):
    """As GPTQ's and AWQ's: weights are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(1, 64))

    def forward(self, x: Any) -> Any:
        return x


def _repacked() -> nn.Module:
    linear = bnb.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu")
    linear.weight.quant_state.packing_format_for_cpu = (
        True  # as a forward in eval mode on a CPU with AVX512-BF16 leaves it
    )
    return linear


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False), "1.1 is a Linear8bitLt of bitsandbytes (load_in"),
        (lambda: bnb.nn.Linear4bit(64, 64), "1.1.weight is to have 4 bits, but it is not quantized yet. Quantize it"),
        (_repacked, "1.1.weight was repacked by a forward in eval mode on the CPU"),
        (QuantLinear, "1.1 is a QuantLinear, quantized with GPTQ or AWQ: its weights are buffers"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(make: Callable[[], nn.Module], text: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Tanh(), make()))
    with pytest.raises(ModelUnsupported, match=re.escape(text)):
        outsize.prepare(model, (torch.ones(4, 64),), device="cpu")


def train(model: nn.Module, optimizer: Any, *args: Any) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(*args).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def reference(model: nn.Module) -> Reference:
    return Reference([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("is_trained", [True, False])
def test_biases_in_another_dtype_than_is_computed_in_train_to_the_bit(compute_dtype: Any, is_trained: bool) -> None:
    """The first forward of a Linear4bit replaces the bias's memory by a cast."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        quantized = [bnb.nn.Linear4bit(64, 64, compute_dtype=compute_dtype, quant_type="nf4") for _ in range(3)]
        for linear in quantized:
            linear.bias.requires_grad_(is_trained)
        layers = [nn.Sequential(linear, nn.Tanh(), nn.Linear(64, 64)) for linear in quantized]
        return nn.Sequential(nn.Linear(64, 64), *layers).to("cpu")

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    plain, model = make(), make()
    wanted = train(plain, reference(plain), x)
    engine = outsize.prepare(
        model, (x,), optimizer=outsize.AdamW(lr=1e-2), device="sim:16MiB", pins=outsize.Pins(n_persist=0)
    )
    assert train(model, engine.optimizer, x) == wanted
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["Embedding4bit", "EmbeddingNF4"])
def test_a_quantized_embedding_streams(kind: str) -> None:
    """In the stem, which is no layer: the profiling run sees which parts it reads."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        embedding = getattr(bnb.nn, kind)(32, 64, dtype=torch.float32).to("cpu")
        return nn.Sequential(embedding, *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))

    ids = torch.arange(16).view(2, 8)
    plain, model = make(), make()
    wanted = train(plain, reference(plain), ids)
    pins = outsize.Pins(n_persist=0)
    engine = outsize.prepare(model, (ids,), optimizer=outsize.AdamW(lr=1e-2), device="sim:16MiB", pins=pins)
    place = engine.runtime.place
    stem = [name for name in place.layout.location if name.startswith("0.")]
    assert len(stem) >= 2 and all(place.streams(place.layout.location[name][0]) for name in stem)
    assert train(model, engine.optimizer, ids) == wanted
    engine.detach()
