"""The profiling run on a real GPU: what it measures does not depend on how much room it has, and it knows when Python is
slower than the card.
"""

import gc
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outsize.base.errors import DeviceOutOfMemory
from outsize.device.choose import choose_device
from outsize.model.discover import find_layers
from outsize.model.work import Work
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer

pytestmark = pytest.mark.gpu


def decoder() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 512, (8, 2048), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def bytes_of(trace: ModelTrace) -> Any:
    works = [
        {
            s: (
                w.forward_peak_bytes,
                w.forward_delta_bytes,
                w.backward_peak_bytes,
                w.backward_delta_bytes,
                w.sent_bytes,
                w.released_bytes,
            )
            for s, w in call.items()
        }
        for call in trace.calls
    ]
    return works, trace.shared, trace.held_bytes


def traced_with_much_and_little_room() -> tuple[Any, Any]:
    """What a trial measures with the whole card, and what under a limit that lets it through and has no room to keep
    aside what is sent.
    """
    device = choose_device("cuda")
    model = decoder()
    layers = find_layers(model, None)
    wide = bytes_of(Tracer(model, batch(), layers, device).trace()[1])
    total = torch.cuda.get_device_properties(0).total_memory
    too_little, enough = 2**25, 2**33
    while enough - too_little > 2**21:
        gc.collect()
        torch.cuda.empty_cache()
        limit = (too_little + enough) // 2
        torch.cuda.set_per_process_memory_fraction(limit / total)
        tracer = Tracer(model, batch(), layers, device)
        try:
            narrow = bytes_of(tracer.trace()[1])
        except DeviceOutOfMemory:
            too_little = limit
        else:
            if tracer.spill_device == torch.device("cpu"):
                return wide, narrow
            enough = limit
    raise AssertionError(
        f"with {enough} bytes a trial keeps on the device what is sent, with {too_little} it does not go through"
    )


def test_a_trial_with_little_room_sends_activations_to_the_host_and_measures_the_same_bytes() -> None:
    # In a process of its own: what other tests left in the allocator's segments would count against the limit.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        wide, narrow = child.submit(traced_with_much_and_little_room).result()
    assert narrow == wide


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


def traced(**how: Any) -> list[Work]:
    model = Stack(**how)
    _, trace = Tracer(model, [torch.randn(4, 64)], find_layers(model, None), choose_device("cuda")).trace()
    return [trace.work(call, "keep") for call in range(1, 13)]


def test_a_trial_says_issuing_from_computing() -> None:
    """Of the layers the quickest, where it is about seconds: a machine that others share holds one up now and then."""
    layers = traced(seconds=0.005)
    assert all(work.forward_launch_seconds > 0.005 and not work.forward_syncs_host for work in layers)
    assert min(work.forward_seconds for work in layers) < 0.005
    layers = traced(cycles=20_000_000)
    assert not any(work.forward_syncs_host for work in layers)
    assert min(work.forward_launch_seconds for work in layers) < 0.5 * min(work.forward_seconds for work in layers)


def test_a_call_that_syncs_the_host_is_known_and_the_head_start_is_in_none_of_its_seconds() -> None:
    """Of the layers the quickest, as above."""
    asking, silent = traced(cycles=5_000_000, waits=True), traced(cycles=5_000_000)
    assert all(work.forward_syncs_host for work in asking)
    computing = min(work.forward_seconds for work in silent)
    assert min(work.forward_seconds for work in asking) < 1.5 * computing
    assert min(work.forward_launch_seconds for work in asking) < 2 * computing
