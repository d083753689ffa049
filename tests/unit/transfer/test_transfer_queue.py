"""TransferQueue: activations of a plain torch model go to the host and back, without a plan or an engine."""

import gc
import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from threaded import ThreadedCpu
from torch import Tensor, nn

from outsize.activation.strategies import RUN
from outsize.base.errors import DeviceOutOfMemory, RaceDetected, TransferError
from outsize.device.cpu import CpuDevice
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.hardware.lanes import Lane
from outsize.schedule.buffers import Buffer
from outsize.schedule.hazards import Hazards, Token
from outsize.transfer.host_arena import HostArena
from outsize.transfer.transfer_queue import Transfer, TransferQueue

WIDTH, ROWS, NUM_LAYERS = 8, 64, 6
INPUT_BYTES = ROWS * WIDTH * 4
MiB = 2**20
DEVICES = {"cpu": CpuDevice, "sim": lambda: SimDevice(lookup("64MiB")), "late copies": ThreadedCpu}
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.25))


class BreaksDown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the layer breaks down")


def layers(number: int = NUM_LAYERS) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(number))


def queue_for(device: Device, model: nn.Module, *, host_bytes: int = MiB, **how: int) -> TransferQueue:
    static = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    return TransferQueue(
        device, arena=HostArena(device, host_bytes), is_static=lambda t: t.untyped_storage().data_ptr() in static, **how
    )


def inputs(rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def run(model: Iterable[nn.Module], x: Tensor, queue: TransferQueue, strategy: str = "offload") -> Tensor:
    x = x * 1.0
    for layer in model:
        transfer = Transfer(queue)
        x = RUN[strategy](layer, (x,), {}, transfer, queue._is_static, layer)
        transfer.send()
    return x


def gradients(model: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.square().sum(), [x, *model.parameters()]))


def plain(model: Iterable[nn.Module], x: Tensor) -> Tensor:
    x = x * 1.0
    for layer in model:
        x = layer(x)
    return x


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def counting(device: SimDevice) -> Iterator[SimDevice]:
    """Count what is allocated on the device."""
    device.open(1, 64 * MiB)
    device.watching(True)
    try:
        yield device
    finally:
        device.watching(False)
        device.close(1)


def is_empty(queue: TransferQueue) -> bool:
    return queue.num_in_flight == queue.num_returned == queue.arena.used_bytes == 0


@EVERY_DEVICE
@pytest.mark.parametrize("strategy", ["offload", "swap"])
@pytest.mark.parametrize("how", [{}, {"max_in_flight": 1, "prefetch": 0}, {"max_in_flight": 3, "prefetch": 2}], ids=str)
def test_gradients_and_the_random_stream_are_those_of_the_plain_model(device, strategy, how) -> None:
    """Traps D37, D39, D48."""
    model, x = layers(), inputs()
    queue = queue_for(device(), model, **how)
    found = []
    for forward in (lambda: plain(model, x), lambda: run(model, x, queue, strategy)):
        torch.manual_seed(3)
        out = forward()
        after_forward = torch.rand(2)
        found.append([out.detach(), *gradients(model, x, out), after_forward, torch.rand(2)])
        del out
    assert same(*found)
    assert is_empty(queue) and queue.arena.num_bytes >= NUM_LAYERS * INPUT_BYTES


@pytest.mark.parametrize("max_in_flight", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_more_copies_than_allowed_are_under_way(max_in_flight: int, prefetch: int) -> None:
    model, x = layers(), inputs()
    queue = queue_for(CpuDevice(), model, max_in_flight=max_in_flight, prefetch=prefetch)
    seen: list[tuple[int, int]] = []
    for layer in model:  # runs in forward, and again in backward
        layer.up.register_forward_hook(lambda *_: seen.append((queue.num_in_flight, queue.num_returned)))
    out = run(model, x, queue)
    assert len(seen) == NUM_LAYERS and max(seen) == (max_in_flight, 0)
    gradients(model, x, out)
    assert max(returned for _, returned in seen) == 1 + prefetch


def peaks(num_layers: int, **how: int) -> tuple[int, int]:
    """Peak of the device in forward and in backward, above what was there before. All layers share their weights, whose
    gradients would grow with the number of layers.
    """
    model, x = layers(1), inputs()
    with counting(SimDevice(lookup("64MiB"))) as device:
        queue = queue_for(device, model, **how)
        base = device.observer.live_bytes
        out = run([model[0]] * num_layers, x, queue)
        forward = device.observer.peak_bytes - base
        device.observer.reset_peak()
        gradients(model, x, out)
        return forward, device.observer.peak_bytes - base


def test_device_memory_does_not_grow_with_the_number_of_layers() -> None:
    """Trap D38."""
    assert peaks(5) == peaks(15)
    forward, _ = peaks(5, max_in_flight=1)
    for more in (1, 2):
        assert peaks(5, max_in_flight=1 + more)[0] == forward + more * INPUT_BYTES
    _, backward = peaks(5, max_in_flight=1, prefetch=0)
    for more in (1, 2):
        assert backward < peaks(5, max_in_flight=1, prefetch=more)[1] <= backward + more * INPUT_BYTES


def test_host_memory_is_used_again_by_batches_of_any_length() -> None:
    """Trap D47."""
    model, rng = layers(3), random.Random(0)
    queue = queue_for(CpuDevice(), model)
    lengths = [rng.randint(1, ROWS) for _ in range(200)]
    longest = 0
    for length in lengths:
        x = inputs(length)
        gradients(model, x, run(model, x, queue))
        longest = max(longest, length)
        assert queue.arena.used_bytes == 0
        assert queue.arena.num_bytes <= 4 * (longest * WIDTH * 4 + 256)
    gradients(model, x, run(model, x, queue))
    assert queue.arena.num_bytes <= 9 / 8 * 3 * (longest * WIDTH * 4 + 256)


@EVERY_DEVICE
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "is abandoned"])
def test_a_forward_that_fails_or_is_abandoned_leaves_nothing_behind(device, fails: bool) -> None:
    """Trap D43."""
    model, x = layers(), inputs()
    machine = device()
    queue = queue_for(machine, model)
    events = set()
    gc.disable()  # only references decide what is freed
    try:
        for _ in range(20):
            if fails:
                with pytest.raises(RuntimeError, match="breaks down"):
                    run([*model, BreaksDown()], x, queue)
            else:
                out = run(model, x, queue)
                assert queue.arena.used_bytes == NUM_LAYERS * INPUT_BYTES
                del out
            assert is_empty(queue)
            events.add(queue._lanes.num_events)
    finally:
        gc.enable()
    assert queue.arena.num_bytes == NUM_LAYERS * INPUT_BYTES and len(events) <= 2
    torch.manual_seed(3)
    expected = gradients(model, x, plain(model, x))
    torch.manual_seed(3)
    assert same(gradients(model, x, run(model, x, queue)), expected)


def test_device_memory_of_an_abandoned_backward_is_freed() -> None:
    model, x = layers(), inputs()
    model[2].up.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with counting(SimDevice(lookup("64MiB"))) as device:
        queue = queue_for(device, model)
        base = device.observer.live_bytes
        for _ in range(3):
            out = run(model, x, queue)
            with pytest.raises(ZeroDivisionError):
                gradients(model, x, out)
            del out
            gc.collect()
            assert is_empty(queue) and device.observer.live_bytes == base


@EVERY_DEVICE
def test_two_graphs_and_a_second_backward(device) -> None:
    """Traps D42, D43."""
    model, one, two = layers(), inputs(seed=1), inputs(seed=2)
    queue = queue_for(device(), model)
    torch.manual_seed(3)
    expected = gradients(model, one, plain(model, one)), gradients(model, two, plain(model, two))
    torch.manual_seed(3)
    outs = run(model, one, queue), run(model, two, queue)
    losses = [out.square().sum() for out in outs]
    del outs
    for number in (0, 1, 0):
        found = torch.autograd.grad(losses[number], [(one, two)[number], *model.parameters()], retain_graph=True)
        assert same(found, expected[number])
        assert queue.num_returned <= 2
    del losses
    assert is_empty(queue)


VIEWS = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:, :1].expand(6, 8),
    "at an offset": lambda x: x[3],
    "no element": lambda x: x[6:],
    "conjugated": lambda x: torch.view_as_complex(x.view(6, 4, 2)).conj(),
    "negated": lambda x: torch.view_as_complex(x.view(6, 4, 2)).conj().imag,
}


@EVERY_DEVICE
def test_views_come_back_exactly(device) -> None:
    """Trap D40."""
    queue = queue_for(device(), nn.Module())
    transfer, saved = Transfer(queue), [view(torch.randn(6, 8)) for view in VIEWS.values()]
    expected = [(t.clone(), t.stride(), t.is_conj(), t.is_neg()) for t in saved]
    handles = [transfer.pack(t) for t in saved]
    transfer.send()
    del saved
    for handle, (value, *facts) in zip(handles, expected, strict=True):
        back = transfer.unpack(handle)
        assert torch.equal(back, value) and [back.stride(), back.is_conj(), back.is_neg()] == facts


def test_one_storage_in_two_sets() -> None:
    """Layers that run side by side have the same input."""
    queue = queue_for(SimDevice(lookup("64MiB")), nn.Module(), max_in_flight=1)
    saved = torch.randn(6, 8)
    transfers = [Transfer(queue) for _ in range(3)]
    handles = []
    for transfer in transfers:
        handles.append(transfer.pack(saved))
        transfer.send()
    for transfer, handle in zip(transfers, handles, strict=True):
        assert torch.equal(transfer.unpack(handle), saved)


def test_what_is_no_activation_of_the_device_is_refused() -> None:
    model = layers(1)
    transfer = Transfer(queue_for(CpuDevice(), model))
    weight = model[0].up.weight
    for tensor, found in (
        (weight, "is a Parameter"),
        (weight.t(), "weight or a buffer"),
        (weight.detach(), "weight or a buffer"),
        (torch.eye(3).to_sparse(), "layout is torch.sparse_coo"),
        (torch.empty(3, device="meta"), "is on meta"),
    ):
        with pytest.raises(TransferError, match=found):
            transfer.pack(tensor)
    with pytest.raises(TransferError, match="No tensor was packed"):
        transfer.send()


def test_a_set_is_packed_then_sent_once_then_unpacked() -> None:
    """Trap D44."""
    transfer = Transfer(queue_for(CpuDevice(), nn.Module()))
    handle = transfer.pack(torch.ones(3))
    assert torch.equal(transfer.unpack(handle), torch.ones(3))
    transfer.send()
    with pytest.raises(TransferError, match="No tensor was packed"):
        transfer.send()
    with pytest.raises(TransferError, match="after its set was sent"):
        transfer.pack(torch.ones(3))
    assert torch.equal(transfer.unpack(handle), torch.ones(3))


@EVERY_DEVICE
def test_full_host_memory_is_an_error_and_the_next_batch_runs(device) -> None:
    model, x = layers(), inputs()
    queue = queue_for(device(), model, host_bytes=NUM_LAYERS * INPUT_BYTES)
    gradients(model, x, run(model, x, queue))
    with pytest.raises(
        TransferError, match=r"memory for transfers is full: 12.0 KiB of 12.0 KiB are in use, and 2.00 KiB"
    ):
        run([*model, *model], x, queue)
    assert is_empty(queue)
    long, half = inputs(2 * ROWS), model[: NUM_LAYERS // 2]
    gradients(half, long, run(half, long, queue))  # the buffers of the first batch are too small
    assert is_empty(queue) and queue.arena.num_bytes == NUM_LAYERS * INPUT_BYTES


def test_full_device_memory_is_an_error_in_backward() -> None:
    model, x = layers(), inputs()
    with counting(SimDevice(lookup("64MiB"))) as device:
        queue = queue_for(device, model)
        out = run(model, x, queue)
        device.budget_bytes = device.observer.live_bytes
        with pytest.raises(DeviceOutOfMemory):
            gradients(model, x, out)


@pytest.mark.parametrize("sent", [False, True])
def test_a_write_into_a_tensor_that_is_being_sent_is_an_error(sent: bool) -> None:
    queue = queue_for(CpuDevice(), nn.Module(), max_in_flight=1)
    saved, transfer = torch.ones(3), Transfer(queue)
    handle = transfer.pack(saved[1:])
    if sent:
        transfer.send()
    saved.add_(1)
    with pytest.raises(TransferError, match="written in place"):
        transfer.unpack(handle) if sent else transfer.send()


@pytest.mark.parametrize("keep_last", [0, 1])
def test_a_set_that_was_written_stays_an_error(keep_last: int) -> None:
    """Also if the user catches the first error, which may come in the forward of another graph."""
    queue = queue_for(CpuDevice(), nn.Module(), max_in_flight=1, keep_last=keep_last)
    saved, transfers = torch.ones(3), [Transfer(queue) for _ in range(2)]
    handle, _ = transfers[0].pack(saved), transfers[1].pack(torch.ones(3))
    transfers[0].send()
    saved.add_(1)
    for _ in range(2):
        with pytest.raises(TransferError, match="written in place"):
            transfers[1].send() if not transfers[1]._is_packed else transfers[0].unpack(handle)


def test_a_set_that_is_dropped_while_the_queue_is_busy_is_released_by_its_next_call() -> None:
    queue = queue_for(CpuDevice(), nn.Module())
    transfer, other = Transfer(queue), Transfer(queue)
    transfer.pack(torch.ones(3))
    other.pack(torch.ones(3))
    transfer.send()
    with queue._lock:
        del transfer
    assert not is_empty(queue)
    other.send()
    del other
    assert is_empty(queue)


def test_a_queue_and_its_host_memory_are_freed_without_the_garbage_collector() -> None:
    model, x = layers(), inputs()
    queue = queue_for(SimDevice(lookup("64MiB")), model)
    gradients(model, x, run(model, x, queue))
    memory, alive = weakref.ref(queue.arena.memory(0)[0].untyped_storage()), weakref.ref(queue)
    gc.disable()
    try:
        del queue
        assert alive() is None and memory() is None
    finally:
        gc.enable()


class ForgetsOne(Hazards):
    """Leaves out one wait."""

    def __init__(self, forgets: int | None):
        super().__init__()
        self._forgets, self.num_waits = forgets, 0

    def before(self, lane: Lane, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> Sequence[Token]:
        tokens = super().before(lane, reads, writes)
        kept = [token for number, token in enumerate(tokens, self.num_waits) if number != self._forgets]
        self.num_waits += len(tokens)
        return kept


def waits(forgets: int | None) -> int:
    model, x = layers(3), inputs()
    queue = queue_for(SimDevice(lookup("64MiB")), model, max_in_flight=1)
    hazards = queue._lanes.hazards = ForgetsOne(forgets)
    for _ in range(2):
        gradients(model, x, run(model, x, queue))
    return hazards.num_waits


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sets are released by finalizers
def test_no_wait_can_be_left_out() -> None:
    num_waits = waits(None)
    assert num_waits > 10
    for number in range(num_waits):
        with pytest.raises(RaceDetected):
            waits(number)
