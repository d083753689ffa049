"""The trial run on a real GPU: what it measures does not depend on how much room it has, and it knows when Python is slower than the card."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outsize.device.choose import choose_device
from outsize.model.discover import find_layers
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer

pytestmark = pytest.mark.gpu


def decoder() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, use_cache=False
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 512, (8, 2048), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def bytes_of(trace: ModelTrace) -> Any:
    works = [{s: (w.forward_peak_bytes, w.forward_delta_bytes, w.backward_peak_bytes, w.backward_delta_bytes, w.sent_bytes, w.released_bytes)
              for s, w in visit.items()} for visit in trace.visits]  # fmt: skip
    return works, trace.shared, trace.held_bytes


def test_a_trial_with_little_room_sends_activations_to_the_host_and_measures_the_same_bytes() -> None:
    device = choose_device("cuda")
    model = decoder()
    layers = find_layers(model, None)
    _, wide = Tracer(model, batch(), layers, device).trace()
    torch.cuda.reset_peak_memory_stats()
    tracer = Tracer(model, batch(), layers, device)
    with tracer._model_untouched():
        tracer._run("keep", scout=True)
        tracer._run("keep")
    least = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    # As much as the pass that keeps everything takes, with what the allocator loses; another layer or two, as for keeping aside what is sent, are not there.
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(1.25 * least / total)
        tracer = Tracer(model, batch(), layers, device)
        _, narrow = tracer.trace()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert tracer.aside == torch.device("cpu"), "the limit was too wide for this test"
    assert bytes_of(narrow) == bytes_of(wide)


class Layer(nn.Module):
    """Its Python takes so many seconds, its device so many cycles, and then it may wait for the device."""

    def __init__(self, seconds: float = 0.0, cycles: int = 0, waits: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.seconds, self.cycles, self.waits = seconds, cycles, waits

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        x = x + self.inner(x)
        if self.waits:
            x.sum().item()
        return x


class Stack(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**how) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def planned_seconds(**how: Any) -> float:
    model = Stack(**how)
    _, trace = Tracer(model, [torch.randn(4, 64)], find_layers(model, None), choose_device("cuda")).trace()
    return sum(visit["keep"].forward_seconds + visit["keep"].backward_seconds for visit in trace.visits)


def test_where_issuing_takes_longer_than_computing_a_step_takes_as_long_as_issuing() -> None:
    assert planned_seconds(seconds=0.005) > 12 * 0.005


def test_waiting_for_the_device_is_not_issuing() -> None:
    """The head start that the trial gives itself would else be counted, for every layer that the measured one stands for."""
    assert planned_seconds(cycles=5_000_000, waits=True) < 1.5 * planned_seconds(cycles=5_000_000)
