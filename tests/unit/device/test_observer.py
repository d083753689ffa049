"""Observer: a storage counts from the first tensor that has it until the last is released."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from outsize.device.observer import ATTENTION_LAUNCH, VIEW_LAUNCH, Observer, parts_of, push_mode, remove_mode


def test_allocations_and_releases_are_counted_and_the_peak_stays() -> None:
    with Observer() as seen:
        x = torch.zeros(10)
        assert (seen.live_bytes, seen.peak_bytes) == (40, 40)
        y = x + 1
        assert seen.live_bytes == 80
        del x
        assert (seen.live_bytes, seen.peak_bytes) == (40, 80)
        del y
        assert (seen.live_bytes, seen.peak_bytes) == (0, 80)
        seen.reset_peak()
        assert seen.peak_bytes == 0


def test_a_release_after_the_observer_left_is_seen() -> None:
    with Observer() as seen:
        x = torch.zeros(10)
    assert seen.live_bytes == 40
    del x
    assert seen.live_bytes == 0


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_a_sparse_tensor_is_its_indices_and_values(convert) -> None:
    """SHiRA and FRoD make them in their forwards."""
    dense = torch.eye(4, 6)
    with Observer() as seen:
        sparse = convert(dense)
        gc.collect()
        expected = sum(part.untyped_storage().nbytes() for part in parts_of(sparse))
        assert seen.live_bytes == expected > 0
        del sparse
        gc.collect()
        assert seen.live_bytes == 0


VIEWS = {
    "slice": lambda x: x[2:],
    "transpose": lambda x: x.t(),
    "reshape": lambda x: x.reshape(-1),
    "expand": lambda x: x[:1].expand(4, 4),
    "detach": lambda x: x.detach(),
    "dtype": lambda x: x.view(torch.int32),
    "split": lambda x: x.split(2)[0],
    "data": lambda x: x.data,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_allocates_nothing_and_keeps_its_storage_alive(view) -> None:
    with Observer() as seen:
        x = torch.zeros(4, 4)
        y = view(x)
        assert seen.live_bytes == 64
        del x
        assert seen.live_bytes == 64
        del y
        assert seen.live_bytes == 0


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_earlier_memory_allocates_nothing(view) -> None:
    before = torch.zeros(4, 4)
    with Observer() as seen:
        y = view(before)
        assert seen.live_bytes == 0
        del y
    assert seen.live_bytes == seen.peak_bytes == 0


def test_writing_in_place_allocates_nothing() -> None:
    before = torch.zeros(4, 4)
    with Observer() as seen:
        before.add_(1)
        before[1:].copy_(torch.ones(()))
        torch.add(before, 1, out=before)
        x = torch.zeros(4)
        x.mul_(2)
        assert seen.live_bytes == 16


def test_every_output_of_an_operator_is_counted() -> None:
    with Observer() as seen:
        out = torch.max(torch.zeros(8, 8), dim=0)
        assert seen.live_bytes == 8 * 4 + 8 * 8 and seen.peak_bytes == 256 + 96
        del out


def test_a_backward_is_seen_by_its_callers_modes() -> None:
    weight = torch.ones(10, requires_grad=True)
    with Observer() as seen:
        loss = (weight * 2).sum()
        level = seen.live_bytes
        loss.backward()
        assert weight.grad is not None and seen.live_bytes == level + 40
    weight.grad = None
    assert seen.live_bytes == level


def test_a_backward_outside_is_not_seen() -> None:
    weight = torch.ones(10, requires_grad=True)
    with Observer() as seen:
        loss = (weight * 2).sum()
    level = seen.live_bytes
    loss.backward()
    assert seen.live_bytes == level


def test_saved_tensors_are_released_with_the_graph() -> None:
    weight = torch.ones(10, requires_grad=True)
    with Observer() as seen:
        out = torch.exp(weight).sum()
        assert seen.live_bytes == 40 + 4
        out.backward()
        weight.grad = None
        assert seen.live_bytes == 4
        del out
        assert seen.live_bytes == 0


def test_a_refused_allocation_is_not_counted() -> None:
    told: list[tuple[int, int]] = []

    def refuse(new: int, live: int) -> None:
        told.append((new, live))
        if live > 100:
            raise MemoryError

    with Observer(refuse) as seen:
        x = torch.zeros(20)
        with pytest.raises(MemoryError):
            x + 1
        assert told == [(80, 80), (80, 160)] and seen.live_bytes == seen.peak_bytes == 80


def test_paused_counts_releases_only() -> None:
    with Observer() as seen:
        x = torch.zeros(10)
        with seen.paused():
            y = torch.zeros(1000)
            del x
        assert seen.live_bytes == 0 and y.numel() == 1000
        z = y + 1
        assert seen.live_bytes == 4000
        del z


def test_adopting_counts_a_tensor_once() -> None:
    seen = Observer()
    x = torch.zeros(10)
    seen.adopt(x)
    seen.adopt(x[2:])
    assert seen.live_bytes == 40
    del x
    assert seen.live_bytes == 0


def test_an_address_that_comes_back_is_another_storage() -> None:
    with Observer() as seen:
        for _ in range(50):
            x = torch.zeros(100)
            assert seen.live_bytes == 400
            del x
            assert seen.live_bytes == 0
    gc.collect()


def test_the_tensors_that_operators_read_are_reported() -> None:
    linear, x, read = torch.nn.Linear(2, 2), torch.ones(2), []
    seen = Observer()
    seen.on_read = lambda func, p: read.append(p)
    with seen:
        linear(x)
    assert {id(p) for p in (linear.weight, linear.bias, x)} <= {id(t) for t in read}


def test_cost_counts_products_and_traffic_but_no_views() -> None:
    seen = Observer()
    seen.cost_of = lambda flops, moved: flops + moved
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    with seen:
        a.t()
        assert (seen.flops, seen.moved_bytes) == (0.0, 0)
        a @ b
    assert seen.flops == 2 * 4 * 8 * 16 and seen.moved_bytes == 4 * (32 + 128 + 64)
    assert seen.seconds == seen.flops + seen.moved_bytes


def test_launches_are_weighted_by_their_cpu_time() -> None:
    seen = Observer()
    seen.cost_of = lambda flops, moved: 0.0
    a = torch.ones(1, 2, 4, 8)
    counts = []
    with seen:
        for work in (
            lambda: a.transpose(1, 2),
            lambda: a + a,
            lambda: torch.nn.functional.scaled_dot_product_attention(a, a, a),
        ):
            before = seen.launches
            work()
            counts.append(seen.launches - before)
    assert counts == pytest.approx([VIEW_LAUNCH, 1.0, ATTENTION_LAUNCH])


# --- the stack of modes


class Named(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_leaves_from_the_middle_of_the_stack_and_the_others_stay_in_order() -> None:
    before = list(_get_current_dispatch_mode_stack())
    below, middle, above, top = Named(), Observer(), Named(), Observer()
    for mode in (below, middle, above, top):
        push_mode(mode)
    remove_mode(middle)
    assert _get_current_dispatch_mode_stack() == [
        top,
        above,
        below,
        *before,
    ]  # each is pushed below those of the caller
    x = torch.zeros(10)
    assert middle.live_bytes == 0 and top.live_bytes == 40
    for mode in (below, top, above):
        remove_mode(mode)
    assert _get_current_dispatch_mode_stack() == before
    del x


def test_removing_a_mode_that_is_not_there_changes_nothing() -> None:
    mode = Named()
    push_mode(mode)
    remove_mode(Observer())
    assert _get_current_dispatch_mode_stack()[0] is mode
    remove_mode(mode)


def test_two_observers_see_the_same_allocations() -> None:
    with Observer() as outer, Observer() as inner:
        x = torch.zeros(10)
        y = x + 1
        assert outer.live_bytes == inner.live_bytes == 80
        del x, y
        assert outer.live_bytes == inner.live_bytes == 0
