"""optim/flat.py: a small module trained in one buffer has the bits of the reference."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, NonFiniteGradient
from outsize.device.cpu import CpuDevice
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.optim.adamw import AdamW
from outsize.optim.flat import FlatModule, flat_bytes, new_scratch, scratch_bytes
from outsize.optim.split import join
from outsize.reference import AdamW as Reference

RATES = (3e-3, 1e-3, 2e-2, 0.0, 5e-3)


class Small(nn.Module):
    """Sizes that fill no segment of the norm and no 256 bytes; a part that not every batch uses."""

    def __init__(self, dtype: torch.dtype, norm: torch.dtype | None = None):
        super().__init__()
        self.first, self.second = nn.Linear(37, 131, dtype=dtype), nn.Linear(131, 37, dtype=dtype)
        self.norm = nn.LayerNorm(37, dtype=norm or dtype)
        self.sometimes = nn.Linear(37, 37, dtype=dtype)
        self.frozen = nn.Linear(37, 37, dtype=dtype).requires_grad_(False)
        self.register_buffer("scale", torch.full((37,), 0.5, dtype=dtype))

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        x = self.second(torch.tanh(self.first(x))) * self.scale
        x = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return (self.sometimes(x) if uses_all else x) + self.frozen(x)


def modules(dtype: torch.dtype, norm: torch.dtype | None = None) -> tuple[Small, Small]:
    torch.manual_seed(0)
    made = Small(dtype, norm), Small(dtype, norm)
    made[1].load_state_dict(made[0].state_dict())
    return made


def batches(dtype: torch.dtype, count: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(5, 37, generator=rng).to(dtype) for _ in range(count)]


def backward(module: nn.Module, x: Tensor, number: int) -> None:
    module(x, number % 3 != 1).float().square().mean().backward()


def flat_of(module: nn.Module, device: Device | None = None, **settings: Any) -> FlatModule:
    device, spec = device or CpuDevice(), AdamW(betas=(0.9, 0.95), weight_decay=0.1, **settings)
    return FlatModule(module, spec, device, new_scratch(device, spec))


def require_equal(flat: FlatModule, plain: nn.Module, reference: Reference) -> None:
    state = flat.state()
    for name, param in plain.named_parameters():
        if not param.requires_grad:
            assert name not in state
            continue
        assert torch.equal(state[name], param), name
        theirs = reference.state.get(param) or {"step": 0}
        for key, value in theirs.items():
            assert torch.equal(state[f"{name}/{key}"].double(), torch.as_tensor(value).double()), f"{name}/{key}"


@pytest.mark.parametrize("fp32_grads", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, torch.float32)])
def test_steps_have_the_bits_of_the_reference(
    dtype: Any, accumulate: int, clip: float | None, fp32_grads: bool
) -> None:
    mine, plain = modules(*dtype)
    flat = flat_of(mine, max_grad_norm=clip, fp32_grads=fp32_grads)
    trained = [param for param in plain.parameters() if param.requires_grad]
    reference = Reference(
        trained, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=clip, fp32_grads=fp32_grads, lr=RATES[0]
    )
    given = iter(batches(dtype[0], accumulate * len(RATES)))
    for number, lr in enumerate(RATES):
        for _ in range(accumulate):
            x = next(given)
            backward(mine, x, number)
            backward(plain, x, number)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        reference.zero_grad()
        stepped = flat.step(lr)
        assert stepped.is_applied and stepped.norm == reference.grad_norm.item()
        require_equal(flat, plain, reference)
    assert flat.state()["sometimes.weight/step"] == len(RATES) - 2  # steps 1 and 4 do not reach it


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    first, second = modules(torch.bfloat16)
    one, other = flat_of(first), flat_of(second)
    given = batches(torch.bfloat16, 4)
    for number, x in enumerate(given[:2]):
        backward(first, x, number)
        one.step(1e-2)
    saved = {name: value.clone() for name, value in one.state().items()}
    backward(second, given[3], 0)  # an accumulated gradient is not kept
    other.load(saved)
    for number, x in enumerate(given[2:]):
        for module, flat in ((first, one), (second, other)):
            backward(module, x, number)
            flat.step(1e-2)
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


def test_a_state_of_another_module_is_refused_whole() -> None:
    flat = flat_of(modules(torch.bfloat16)[0])
    before = {name: value.clone() for name, value in flat.state().items()}
    for wrong in (
        {name: value for name, value in before.items() if name != "first.weight/lo"},
        {**before, "first.bias": torch.zeros(3, dtype=torch.bfloat16)},
        {**before, "norm.bias/exp_avg": before["norm.bias/exp_avg"].bfloat16()},
    ):
        with pytest.raises(BadFile):
            flat.load({name: value + 1 if value.dim() else value for name, value in wrong.items()})
        assert all(torch.equal(value, before[name]) for name, value in flat.state().items())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    """D25."""
    for policy in ("skip", "raise"):
        mine, _ = modules(torch.bfloat16)
        flat = flat_of(mine, nonfinite=policy, max_grad_norm=1.0)
        x = batches(torch.bfloat16, 2)
        backward(mine, x[0], 0)
        flat.step(1e-2)
        before = {name: value.clone() for name, value in flat.state().items()}
        backward(mine, x[1] * value, 0)
        if policy == "skip":
            assert not flat.step(1e-2).is_applied and flat.num_skipped == 1
        else:
            with pytest.raises(NonFiniteGradient, match=r"^first\.weight: its gradient is not finite"):
                flat.step(1e-2)
        assert all(torch.equal(value, before[name]) for name, value in flat.state().items())
        backward(mine, x[1], 0)
        assert flat.step(1e-2).is_applied  # nothing is left of the bad gradient


def test_small_updates_are_not_lost_in_bf16() -> None:
    """D13: with lr 1e-5 the weights' masters move as in fp32."""
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        module = nn.Linear(64, 64, bias=False).bfloat16().to(dtype)
        start, flat = module.weight.detach().float().clone(), flat_of(module)
        rng = torch.Generator().manual_seed(0)
        for _ in range(50):
            x = torch.randn(64, 64, generator=rng).bfloat16().to(dtype)
            (module(x).float() * 1e-2).sum().backward()
            flat.step(1e-5)
        state = flat.state()
        master = state["weight"].float()
        if dtype == torch.bfloat16:
            master = join(state["weight"], state["weight/lo"])
        moved[dtype] = (master - start).norm()
    assert moved[torch.bfloat16] >= 0.95 * moved[torch.float32]


def test_its_memory_is_planned_to_the_byte() -> None:
    device = SimDevice(lookup("64MiB"))
    spec = AdamW()
    module, _ = modules(torch.bfloat16, torch.float32)
    numels = {name: (p.numel(), p.dtype) for name, p in module.named_parameters() if p.requires_grad}
    scratch = new_scratch(device, spec)
    assert device.peak_bytes == scratch_bytes(spec)
    flat = FlatModule(module, spec, device, scratch)
    buffers, frozen = module.scale.nbytes, sum(param.nbytes for param in module.frozen.parameters())
    assert device.peak_bytes - scratch_bytes(spec) == flat_bytes(numels, spec) + buffers + frozen
    assert flat.module is module


def test_a_dropped_module_frees_its_memory() -> None:
    module, _ = modules(torch.bfloat16)
    flat = flat_of(module)
    backward(module, batches(torch.bfloat16, 1)[0], 0)
    flat.step(1e-3)
    dead = weakref.ref(flat)
    del flat, module
    gc.collect()
    assert dead() is None
