"""LayerOffload: layers of a plain torch model run under a strategy that sends tensors off the device. The traps of hidden
-state offload, D37 to D48.
"""

import copy
import gc
import pickle
import random
from typing import Any

import offloads
import pytest
import torch
from offloads import INPUT_BYTES, ROWS, WIDTH, MiB, Model, inputs, offloading, same, step
from threaded import ThreadedCpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from outsize.activation.attention import is_attention
from outsize.activation.strategies import RUN
from outsize.activation.user_checkpointing import is_in_backward
from outsize.base.errors import EngineMisuse, ModelUnsupported, TransferError
from outsize.device.cpu import CpuDevice
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.setup.activation_offload import hidden_states_offload
from outsize.transfer.transfer_queue import TransferQueue

DEVICES = {"cpu": CpuDevice, "sim": lambda: SimDevice(lookup("64MiB")), "late copies": ThreadedCpu}
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
HOW = [{}, {"keep_last": 0}, {"max_in_flight": 1, "prefetch": 2, "keep_last": 1}]


def is_empty(queue: TransferQueue) -> bool:
    return queue.num_in_flight == queue.num_returned == queue.arena.used_bytes == 0


@EVERY_DEVICE
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("strategy", ["offload", "swap"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_bits_are_those_of_torchs_checkpointing_d37(device, how, strategy: str, autocast: bool) -> None:
    """Traps D37, D48: loss, gradients, and random numbers after forward and backward, with dropout."""
    model, x = Model(), inputs()
    expected = step(model, x, autocast=autocast)
    model.run_layer = offloads.checkpointed(False)
    assert same(step(model, x, autocast=autocast), expected)
    model.run_layer = offloads._call
    with offloading(model, device(), strategy, **how) as (offload, queue):
        for _ in range(2):
            assert same(step(model, x, autocast=autocast), expected)
            assert is_empty(queue)
        assert offload.num_sent == 2 * (6 - queue._keep_last)
        assert queue.arena.num_bytes >= (6 - queue._keep_last) * INPUT_BYTES // (1 + autocast)


@pytest.mark.parametrize("autocast", [False, True])
def test_backward_of_a_whole_model_equals_reentrant_checkpointing_d37(autocast: bool) -> None:
    model = Model()

    def found() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(inputs())
        loss.backward()
        return [loss.detach(), *(param.grad for param in model.parameters()), torch.rand(2)]

    model.run_layer = offloads.checkpointed(True)
    expected = found()
    model.run_layer = offloads._call
    with offloading(model, CpuDevice()) as (offload, _):
        assert same(found(), expected) and offload.num_sent == 3


def peaks(num_calls: int, **how: int) -> tuple[int, int]:
    """Peak of the device in forward and backward, above what was there before."""
    model, x = Model(1, num_calls=num_calls, dropout=0.0), inputs()
    device = SimDevice(lookup("64MiB"))
    device.open(1, 64 * MiB)
    device.watching(True)
    try:
        with offloading(model, device, **how):
            base = device.observer.live_bytes
            loss = model(x)
            forward = device.observer.peak_bytes - base
            device.observer.reset_peak()
            torch.autograd.grad(loss, [x, *model.parameters()])
            return forward, device.observer.peak_bytes - base
    finally:
        device.watching(False)
        device.close(1)


def test_the_peak_does_not_depend_on_the_number_of_layers_d38() -> None:
    """Trap D38: 8 and 32 layers; and every copy in flight, every set that is kept and every prefetch is one input."""
    assert peaks(8) == peaks(32)
    least = peaks(8, max_in_flight=1, prefetch=0, keep_last=0)
    for in_flight, prefetch, keep in ((2, 0, 0), (2, 1, 0), (2, 1, 3)):
        found = peaks(8, max_in_flight=in_flight, prefetch=prefetch, keep_last=keep)
        assert found[0] <= least[0] + (in_flight - 1 + keep) * INPUT_BYTES
        assert found[1] <= least[1] + max(prefetch, keep) * INPUT_BYTES


def test_late_copies_and_poisoned_memory_change_nothing_d39() -> None:
    """Trap D39: what was freed on the device is overwritten at once, the arena when it is empty, and copies come late."""
    model, x = Model(), inputs()
    expected = step(model, x)
    given: list[Tensor] = []
    with offloading(model, ThreadedCpu(seconds=0.004), keep_last=1) as (_, queue):

        def poison(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not is_in_backward():
                given.append(args[0].detach())
                for number, tensor in zip(list(queue._sets), given, strict=False):
                    if number not in queue._in_flight:
                        tensor.fill_(torch.nan)

        for layer in model.layers:
            layer.register_forward_pre_hook(poison)
        for _ in range(3):
            given.clear()
            assert same(step(model, x), expected)
            for memory in queue.arena.memory(0):
                memory.fill_(0xFF)
    assert sum(tensor.isnan().any().item() for tensor in given) >= 2


VIEWS = {
    "offset": lambda x: x[1:],
    "strided": lambda x: torch.cat([x, x], 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(ROWS, WIDTH),
}


@EVERY_DEVICE
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_as_inputs_d40(device, view) -> None:
    """Trap D40."""
    model, x = Model(), inputs()
    model.run_layer = lambda layer, hidden, mask: layer(view(hidden), mask)
    expected = step(model, x)
    with offloading(model, device(), keep_last=0):
        assert same(step(model, x), expected)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dimension", [None, 0, 1])
@pytest.mark.parametrize("keep_last", [0, 3])
def test_dtensors_come_back_with_their_placements_d41(one_rank, dimension: int | None, keep_last: int) -> None:
    """Trap D41."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if dimension is None else Shard(dimension)]
    seen = []

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(x, DTensor)
            seen.append((x.placements, x.shape))
            return DTensor.from_local(
                x.to_local() * self.weight, one_rank, x.placements, shape=x.shape, stride=x.stride()
            )

    model = nn.Sequential(*(nn.Sequential(Doubles(), Doubles()) for _ in range(5)))
    x = inputs()

    def gradients() -> list[Tensor]:
        out = model(DTensor.from_local(x, one_rank, placements)).to_local().square().sum()
        return list(torch.autograd.grad(out, [x, *model.parameters()]))

    expected = gradients()
    with offloading(model, CpuDevice(), keep_last=keep_last) as (offload, queue):
        assert same(gradients(), expected)
        assert offload.num_sent == 5 - keep_last and is_empty(queue)
    assert set(seen) == {(tuple(placements), x.shape)}


@EVERY_DEVICE
@pytest.mark.parametrize("how", HOW, ids=str)
def test_two_graphs_and_backwards_in_any_order_d42(device, how) -> None:
    """Traps D42, D43: also a second backward over the same graph."""
    model, xs = Model(dropout=0.0), (inputs(seed=1), inputs(seed=2))
    expected = [torch.autograd.grad(model(x), [x, *model.parameters()]) for x in xs]
    with offloading(model, device(), **how) as (_, queue):
        losses = [model(x) for x in xs]
        for number in (0, 1, 0):
            found = torch.autograd.grad(losses[number], [xs[number], *model.parameters()], retain_graph=True)
            assert same(found, expected[number])
        del losses
        gc.collect()
        assert is_empty(queue)


@EVERY_DEVICE
@pytest.mark.parametrize("end", ["fails", "is abandoned", "has no backward"])
def test_forwards_without_a_backward_leave_nothing_behind_d43(device, end: str) -> None:
    """Trap D43: 50 steps."""
    model, x = Model(), inputs()
    expected = step(model, x)
    with offloading(model, device()) as (offload, queue):
        step(model, x)
        num_bytes = queue.arena.num_bytes
        for _ in range(50):
            if end == "fails":
                handle = model.layers[5].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(x)
                handle.remove()
            elif end == "is abandoned":
                loss = model(x)
                assert queue.arena.used_bytes == 3 * INPUT_BYTES
                del loss
            else:
                with torch.no_grad():
                    model(x)
            gc.collect()
            assert is_empty(queue) and len(queue._kept) <= 4
        assert queue.arena.num_bytes == num_bytes and offload.num_sent >= 3
        assert same(step(model, x), expected)


def test_layers_that_are_called_with_keywords_are_offloaded_d44() -> None:
    """Trap D44: the mask comes first, and it is the hidden states that are sent."""
    model, x = Model(), inputs()
    expected = step(model, x)
    model.run_layer = offloads.by_keywords
    with offloading(model, CpuDevice(), keep_last=0) as (offload, queue):
        assert same(step(model, x), expected)
        assert offload.num_sent == 6 and queue.arena.num_bytes == 6 * INPUT_BYTES


def test_nothing_offloaded_is_an_error_d44() -> None:
    """Trap D44: too few layers, layers that are not called, and only the last layers trained."""
    one, other, last = Model(2), Model(), Model()
    other.run_layer = lambda layer, x, mask: layer.down(torch.tanh(layer.up(x)))
    last.requires_grad_(False)
    last.layers[5].requires_grad_(True)
    for model in (one, other, last):
        with offloading(model, CpuDevice()), pytest.raises(ModelUnsupported, match="no activations of its layers"):
            model(torch.ones(2, WIDTH))
    with offloading(one, CpuDevice()), torch.no_grad():
        one(inputs())  # nothing to offload


@pytest.mark.parametrize("device", [CpuDevice, DEVICES["sim"]])
def test_host_memory_is_stable_over_lengths_d47(device) -> None:
    """Trap D47."""
    model, rng, longest = Model(), random.Random(0), 0
    with offloading(model, device(), keep_last=0) as (_, queue):
        sizes = []
        for _ in range(200):
            rows = rng.randint(1, ROWS)
            longest = max(longest, rows)
            model(inputs(rows)).backward()
            sizes.append(queue.arena.num_bytes)
            assert queue.arena.used_bytes == 0
        needed = 6 * (longest * WIDTH * 4 + 256)
        assert max(sizes) <= 9 / 8 * needed + needed / 6 and sizes[-1] <= 9 / 8 * needed


def test_a_write_into_an_input_is_an_error() -> None:
    model = Model()
    model.run_layer = lambda layer, x, mask: layer(x, mask) + x.mul_(2)
    with offloading(model, CpuDevice()), pytest.raises(TransferError, match="written in place"):
        model(inputs())


# --- what else happens to a model


def test_checkpointing_around_layers_is_refused() -> None:
    model = Model()
    model.run_layer = offloads.checkpointed(False)
    with offloading(model, CpuDevice()):
        loss = model(inputs())
        torch.autograd.grad(loss, list(model.parameters()))  # it saves nothing itself, and the layer is not run again
    model.run_layer = lambda layer, x, mask: checkpoint(lambda *a: layer(*a).tanh(), x, mask, use_reentrant=False)
    with offloading(model, CpuDevice()):
        loss = model(inputs())
        with pytest.raises(ModelUnsupported, match="called again in backward"):
            loss.backward()


def test_copies_are_plain_and_disabling_restores_the_layers() -> None:
    model, x = Model(), inputs()
    model.layers[0].forward = own = model.layers[0].forward  # set on the instance, as accelerate does
    with offloading(model, CpuDevice()) as (offload, queue):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        assert other(x) == 0, "the copy has its own weights"
        assert offload.num_sent == 0
        with pytest.raises(EngineMisuse, match="Save the state_dict"):
            pickle.dumps(model.layers[1])
        assert model.state_dict().keys() == other.state_dict().keys()
        with pytest.raises(EngineMisuse, match="offloaded already"), offloading(model, CpuDevice()):
            pass
        loss = model(x)
    assert model.layers[0].__dict__["forward"] is own and "forward" not in model.layers[1].__dict__
    loss.backward()  # a graph that was made before stays valid
    del loss
    gc.collect()
    assert is_empty(queue) and not model._forward_hooks and not model._forward_pre_hooks


def test_inputs_that_are_weights_are_recomputed() -> None:
    model = Model(dropout=0.0)
    model.stem = nn.Identity()
    weight = nn.Parameter(torch.randn(1, WIDTH))
    expected = torch.autograd.grad(model(weight.expand(ROWS, WIDTH)), [weight])
    with offloading(model, CpuDevice(), keep_last=0) as (offload, _):
        assert same(torch.autograd.grad(model(weight.expand(ROWS, WIDTH)), [weight]), expected)
        assert offload.num_sent == 5


def test_the_strategies_of_the_engine_take_the_same_input() -> None:
    layer, mask, x = offloads.Layer(), torch.ones(2 * WIDTH), inputs()
    packed = []

    class Collects:
        def pack(self, tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

    RUN["offload"](layer, (), {"mask": mask, "hidden_states": x}, Collects(), lambda _: False, layer)
    RUN["offload"](layer, (x, mask), {}, Collects(), lambda _: False, layer)
    assert [tensor is x for tensor in packed] == [True, True]


class Counting(TorchDispatchMode):
    """How often attention operators run."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += is_attention(func)
        return func(*args, **(kwargs or {}))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.Module(), nn.Linear(WIDTH, WIDTH)
        self.attention.forward = lambda q: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, 2, ROWS, WIDTH // 2)
        return x + self.out(self.attention(heads).reshape(ROWS, WIDTH)).tanh()


@pytest.mark.parametrize("keep_last", [0, 3])
def test_attention_is_computed_once_if_it_is_saved(keep_last: int) -> None:
    model, x = nn.Sequential(*(Attends() for _ in range(6))), inputs()

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))

    def kernels() -> int:
        with Counting() as counting:
            assert same(gradients(), expected)
        return counting.runs

    expected = gradients()
    with offloading(model, CpuDevice(), keep_last=keep_last):
        assert kernels() == 12
    with offloading(model, CpuDevice(), keep_last=keep_last, save_attention=True) as (_, queue):
        gradients()
        assert kernels() == 6
        assert queue.arena.num_bytes >= 2 * (6 - keep_last) * INPUT_BYTES


def test_with_attention_the_peak_is_that_of_one_layer_and_one_prefetched() -> None:
    """With all weights frozen, whose gradients would add up. A set has an input and the outputs of attention."""

    def peak(num_layers: int, save_attention: bool) -> int:
        model, x = nn.Sequential(*(Attends() for _ in range(num_layers))).requires_grad_(False), inputs()
        device = SimDevice(lookup("64MiB"))
        device.open(1, 64 * MiB)
        device.watching(True)
        try:
            with hidden_states_offload(model, save_attention=save_attention, device=device) as offload:
                base = device.observer.live_bytes
                loss = model(x).square().sum()
                device.observer.reset_peak()
                torch.autograd.grad(loss, x)
                assert offload.num_sent == num_layers - (1 if save_attention else 3)
                return device.observer.peak_bytes - base
        finally:
            device.watching(False)
            device.close(1)

    found = peak(8, save_attention=True)
    assert found == peak(32, save_attention=True)
    outputs = INPUT_BYTES + ROWS * 2 * 4  # the result, and a sum for each token and head
    # In place of the inputs of three layers: the sets of the layer in use and of the one before it.
    assert found <= peak(8, save_attention=False) - 3 * INPUT_BYTES + 2 * (INPUT_BYTES + outputs)


def test_saving_attention_of_layers_without_it_is_an_error() -> None:
    model = Model()
    with (
        offloading(model, CpuDevice(), save_attention=True),
        pytest.raises(ModelUnsupported, match="no attention operat"),
    ):
        model(inputs())
