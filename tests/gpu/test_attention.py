"""Attention on CUDA: each kernel of SDPA and `varlen_attn` runs once in a layer that saves its outputs, with the bits
of recomputing; kernels are timed, and the plan names the one in use.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import packed
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import outsize
from outsize.activation.attention import is_attention, saves_attention
from outsize.activation.strategies import offload_save_attention, recompute, recompute_save_attention
from outsize.base.errors import ModelUnsupported
from outsize.device.choose import choose_device
from outsize.device.sdp_kernel import allowed_kernels, only_kernel
from outsize.profile.attention_kernels import AttentionCall, timed_on
from outsize.transfer.offloaded_tensors import OffloadedTensors

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic")]
OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "varlen": "torch_attn::_varlen_attn",
}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # strictly, torch allows no cudnn
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func):
            self.runs[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def model(kernel: str = "flash") -> nn.Module:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if kernel == "efficient" else 2,  # it has no grouped heads
        vocab_size=97,
        attn_implementation="outsize_varlen" if kernel == "varlen" else "sdpa",
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()


def trained(kernel: str, run: Any) -> tuple[list[torch.Tensor], dict[str, int], bool]:
    """Loss and gradients, how often which attention operator ran, and whether the layers can save its outputs."""
    subject, counting, sets = model(kernel), Counting(), []
    layers = subject.model.layers

    def wrapped(layer: nn.Module, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sets.append(OffloadedTensors())
            return run(forward, args, kwargs, sets[-1], lambda t: False, layer)

        return call

    for layer in layers:
        layer.forward = wrapped(layer, layer.forward)
    if kernel == "varlen":
        batch = packed.batch(packed.documents(90, 38), packed.documents(128))
    else:
        batch = {"input_ids": torch.arange(2 * 128).view(2, 128) % 97}
        batch["labels"] = batch["input_ids"]
    on_gpu = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
    with counting:
        loss = subject(**on_gpu, use_cache=False).loss
        for offloaded in sets:
            if offloaded.num_bytes:
                arena = torch.empty(offloaded.num_bytes, dtype=torch.uint8, pin_memory=True)
                offloaded.copy_to(arena)
                torch.cuda.synchronize()
                offloaded.free_device_copy()
                offloaded.attach_buffer(arena.cuda())
        loss.backward()
    grads = [param.grad for param in subject.parameters() if param.grad is not None]
    return [loss.detach(), *grads], dict(counting.runs), all(map(saves_attention, layers))


@pytest.mark.parametrize("kernel", list(OPERATORS))
def test_the_kernel_runs_once_with_the_bits_of_recomputing(kernel: str) -> None:
    if kernel == "varlen":
        packed.register()
    with only_kernel(kernel if kernel != "varlen" else "flash"):
        expected, runs, _ = trained(kernel, recompute)
        assert runs == {OPERATORS[kernel]: 4}
        for run in (recompute_save_attention, offload_save_attention):
            found, runs, can_save = trained(kernel, run)
            assert can_save and runs == {OPERATORS[kernel]: 2}
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_kernel_that_cannot_compute_the_model_is_named() -> None:
    ids = torch.arange(2 * 128).view(2, 128) % 97
    with only_kernel("efficient"), pytest.raises(ModelUnsupported, match="may use efficient alone"):
        outsize.prepare(model().cpu(), {"input_ids": ids, "labels": ids}, device="cuda")


def test_kernels_are_timed() -> None:
    call = AttentionCall("flash", (1, 8, 4096, 128), *2 * [(1, 2, 4096, 128)], torch.bfloat16, True, False, None)
    device, before = choose_device("cuda"), allowed_kernels()
    assert all((timed_on(device, call, kernel) or 0.0) > 0 for kernel in ("flash", "cudnn"))
    assert allowed_kernels() == before


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_the_plan_names_the_kernel_in_use_and_compares_the_others(kernel: str) -> None:
    with only_kernel(kernel):
        ids = torch.arange(2 * 128).view(2, 128) % 97
        engine = outsize.prepare(model().cpu(), {"input_ids": ids, "labels": ids}, device="cuda")
        text = engine.plan.attention
        engine.detach()
    other = {"flash": "cudnn", "cudnn": "flash"}[kernel]
    assert text.startswith(f"{kernel}; ") and f"{other} takes " in text
