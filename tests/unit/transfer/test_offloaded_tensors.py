"""OffloadedTensors: whatever view of whatever storage autograd saved comes back as the same view of the same bytes."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outsize.base.units import ALIGN_BYTES
from outsize.transfer.offloaded_tensors import OffloadedTensors, PackedTensor

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def bits(tensor: Tensor) -> list[int]:
    """The elements as bytes: NaN equals itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


def travel(offloaded: OffloadedTensors) -> None:
    """To the host and back, into a buffer that is larger than the offloaded and held other bytes before."""
    arena = torch.full((offloaded.num_bytes + 64,), 0xAA, dtype=torch.uint8)
    offloaded.copy_to(arena)
    offloaded.free_device_copy()
    buffer = torch.full((offloaded.num_bytes + 512,), 0xBB, dtype=torch.uint8)[: offloaded.num_bytes]
    buffer.copy_(arena[: offloaded.num_bytes])
    offloaded.attach_buffer(buffer)


@dataclass(frozen=True)
class View:
    storage: int
    shape: tuple[int, ...]
    host_update_interval: tuple[int, ...]
    offset: int


@st.composite
def storages_and_views(draw: st.DrawFn) -> tuple[list[tuple[torch.dtype, int]], list[View]]:
    """Some storages, and views of them with any strides that stay inside: sliced, transposed, expanded
    (host_update_interval 0), overlapping.
    """
    storages = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 90)), min_size=1, max_size=3))
    views = []
    for _ in range(draw(st.integers(1, 5))):
        number = draw(st.integers(0, len(storages) - 1))
        numel = storages[number][1]
        offset = draw(st.integers(0, numel - 1))
        room = numel - 1 - offset
        shape, host_update_interval = [], []
        for _ in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, 4))
            step = draw(st.integers(0, 7))
            if size > 1 and step * (size - 1) > room:
                step = room // (size - 1)
            room -= step * max(size - 1, 0)
            shape.append(size)
            host_update_interval.append(step)
        views.append(View(number, tuple(shape), tuple(host_update_interval), offset))
    return storages, views


@given(storages_and_views(), st.integers(0, 2**31))
def test_any_views_of_any_storages_come_back_with_their_bits_and_their_geometry(
    case: tuple[list[tuple[torch.dtype, int]], list[View]], seed: int
) -> None:
    """Traps A2, A3, A19, D40."""
    specs, views = case
    rng = torch.Generator().manual_seed(seed)
    storages = []
    for dtype, numel in specs:
        highest = 2 if dtype is torch.bool else 256
        storages.append(
            torch.randint(0, highest, (numel * dtype.itemsize,), dtype=torch.uint8, generator=rng).view(dtype)
        )
    saved = [storages[v.storage].as_strided(v.shape, v.host_update_interval, v.offset) for v in views]
    expected = [(bits(t), t.shape, t.stride(), t.dtype) for t in saved]
    offloaded = OffloadedTensors()
    handles = [offloaded.pack(t) for t in saved]
    used = {v.storage for v in views}
    assert offloaded.num_bytes == sum(-(-storages[i].nbytes // ALIGN_BYTES) * ALIGN_BYTES for i in used), (
        "a storage travels once, however many views"
    )
    del storages, saved
    travel(offloaded)
    for handle, facts in zip(handles, expected, strict=True):
        back = offloaded.unpack(handle)
        assert (bits(back), back.shape, back.stride(), back.dtype) == facts


VIEWS = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:, :1].expand(6, 8),
    "overlapping": lambda x: x.flatten().unfold(0, 5, 2),
    "at an offset": lambda x: x[3],
    "one element": lambda x: x[2, 3],
    "no element": lambda x: x[6:],
    "other dtype": lambda x: x.view(torch.int16),
    "real part": lambda x: torch.view_as_complex(x.view(6, 4, 2)).real,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_each_kind_comes_back(view) -> None:
    """Traps A2, A3, A19, D40, by name."""
    base = torch.randn(6, 8)
    saved = view(base)
    offloaded = OffloadedTensors()
    first, handle = (
        offloaded.pack(torch.ones(3, dtype=torch.uint8)),
        offloaded.pack(saved),
    )  # not at the start of the arena
    expected = (bits(saved), saved.shape, saved.stride(), saved.dtype, saved.storage_offset())
    assert (handle.shape, handle.stride, handle.offset) == (saved.shape, saved.stride(), saved.storage_offset())
    travel(offloaded)
    back = offloaded.unpack(handle)
    assert (bits(back), back.shape, back.stride(), back.dtype, handle.offset) == expected
    assert bits(offloaded.unpack(first)) == [1, 1, 1]


@pytest.mark.parametrize("view", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugate", "negative"])
def test_lazily_conjugated_and_negated_tensors_come_back_as_they_were(view) -> None:
    """Trap A3: a view's metadata is more than strides. Autograd saves such tensors in models with complex rotary
    tables.
    """
    saved = view(torch.randn(4, dtype=torch.complex64))
    expected = saved.resolve_conj().resolve_neg().clone()
    offloaded = OffloadedTensors()
    handle = offloaded.pack(saved)
    travel(offloaded)
    assert torch.equal(offloaded.unpack(handle).resolve_conj().resolve_neg(), expected)


def test_two_views_share_their_storage_again_when_they_are_back() -> None:
    base = torch.arange(8.0)
    offloaded = OffloadedTensors()
    left, right = offloaded.pack(base[:4]), offloaded.pack(base[2:6])
    travel(offloaded)
    offloaded.unpack(left)[2] = 99.0
    assert offloaded.unpack(right)[0] == 99.0
    assert offloaded.num_bytes == ALIGN_BYTES and len(offloaded.offsets) == 1


def test_every_storage_begins_at_a_multiple_of_256_bytes() -> None:
    offloaded = OffloadedTensors()
    for numel in (1, 300, 256, 257):
        offloaded.pack(torch.zeros(numel, dtype=torch.uint8))
    assert offloaded.offsets == [0, 256, 768, 1024] and offloaded.num_bytes == 1536


def test_the_whole_storage_travels_for_a_small_view_of_it() -> None:
    """What is sent is what dies on the device, and a view keeps all of its storage alive."""
    offloaded = OffloadedTensors()
    offloaded.pack(torch.zeros(1000, dtype=torch.uint8)[10:12])
    assert offloaded.num_bytes == 1024


def test_unpacking_before_the_bytes_are_back_is_an_error() -> None:
    """Trap A22: activations that were not copied back are not used."""
    offloaded = OffloadedTensors()
    handle = offloaded.pack(torch.ones(4))
    with pytest.raises(AssertionError, match="before they were copied back"):
        offloaded.unpack(handle)
    offloaded.copy_to(torch.empty(offloaded.num_bytes, dtype=torch.uint8))
    offloaded.free_device_copy()
    with pytest.raises(AssertionError, match="before they were copied back"):
        offloaded.unpack(handle)


def test_letting_go_frees_the_storages_and_not_before() -> None:
    saved = torch.ones(100)
    storage = weakref.ref(saved.untyped_storage())
    offloaded = OffloadedTensors()
    handles: list[PackedTensor] = [offloaded.pack(saved), offloaded.pack(saved[3:])]
    del saved
    assert storage() is not None, "the copy still reads it"
    offloaded.copy_to(torch.empty(offloaded.num_bytes, dtype=torch.uint8))
    offloaded.free_device_copy()
    assert storage() is None and len(handles) == 2


def test_what_is_packed_needs_no_grad_and_touches_no_version() -> None:
    leaf = torch.ones(4, requires_grad=True)
    saved = leaf * 2
    version = saved._version
    offloaded = OffloadedTensors()
    handle = offloaded.pack(saved)
    travel(offloaded)
    assert saved._version == version and not offloaded.unpack(handle).requires_grad
