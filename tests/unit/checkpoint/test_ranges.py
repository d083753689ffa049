"""Ranges: a tensor in flat ranges of memory. A store that holds every tensor in two of them saves, exports and loads the
same files as the engine, which has one.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from torch import Tensor, nn

import outsize
from outsize.checkpoint.checkpoints import Checkpoints
from outsize.checkpoint.parameter_store import ParameterStore, TrainedModel
from outsize.checkpoint.ranges import Ranges, memory_order
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.device.cpu import CpuDevice
from outsize.runtime.engine import Engine


def split(tensor: Tensor) -> Ranges:
    """Two ranges with memory of their own, split at an odd element; the second one first."""
    stride = None if tensor.is_contiguous() else tensor.stride()
    flat = (tensor if stride is None else tensor.permute(memory_order(stride))).reshape(-1)
    odd = min(flat.numel(), flat.numel() // 2 | 1)
    return Ranges(tensor.shape, stride, ((flat[odd:].clone(), odd), (flat[:odd].clone(), 0)))


class SplitStore:
    def __init__(self, model: nn.Module, state: dict[str, dict[str, Tensor]]) -> None:
        """`state`: per trained parameter, its optimizer state."""
        self.params, self.device = dict(model.named_parameters()), CpuDevice()
        values = model.state_dict()
        self._values = {name: split(values[name].detach()) for name in self.params}
        self._state = {name: {key: split(t) for key, t in tensors.items()} for name, tensors in state.items()}

    def clear(self) -> None:
        for ranges in (*self._values.values(), *(r for state in self._state.values() for r in state.values())):
            ranges.copy_(torch.zeros((), dtype=ranges.spec.dtype))

    def ranges(self, name: str) -> Ranges:
        return self._values[name]

    def state_ranges(self, name: str) -> dict[str, Ranges]:
        return self._state[name]

    def value(self, name: str) -> Tensor:
        return self._values[name].whole()

    def load(self, names: Iterable[str], read: Callable[[str, Ranges], None]) -> None:
        for name in names:
            read(name, self._values[name])

    def chunk_of(self, name: str) -> int:
        return list(self.params).index(name)

    def host_chunks(self) -> set[int]:
        return set(range(0, len(self.params), 2))


def in_split_store(engine: Engine) -> tuple[TrainedModel, SplitStore]:
    """The engine's model with values and optimizer state in a `SplitStore`."""
    names = engine.optimizer.names
    state = {name: {k: t for k, t in engine.optimizer_state(name).items() if k != "step"} for name in names}
    store = SplitStore(engine.model, state)
    checked: ParameterStore = store
    steps = {name: int(engine.optimizer_state(name)["step"]) for name in names}
    groups = [dict(group) for group in engine.optimizer.param_groups]
    return TrainedModel(engine.model, checked, steps, groups, engine.plan.loss_chunk), store


class PermutedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5).t() * 0.3)
        self.cube = nn.Parameter(torch.randn(3, 5, 7).permute(1, 2, 0) * 0.3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.tanh(x @ self.weight) @ self.cube.sum(2).t()) * self.scale


class Permuted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(PermutedLayer() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def trained_engine(kind: str) -> Engine:
    if kind == "permuted":
        model, batch = Permuted(), {"x": torch.randn(4, 5)}
        spec = outsize.AdamW(lr=1e-2)
        engine = cells.prepare_by_hand(model, batch, spec=spec, weights="host", optimizer="host", chunk_bytes=512)
        loss: Any = model(**batch)["loss"]
    else:
        engine = cells.prepare(cells.Cell(kind=kind, dtype="bf16", weights="host", optimizer="host"), chunk_bytes=4096)
        loss = engine.model(**zoo.batch(kind)).loss
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return engine


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["llama", "mixtral", "permuted"])
def test_two_ranges_of_each_tensor_give_the_same_files_and_load_them(tmp_path: Path, kind: str) -> None:
    with cells.closing(trained_engine(kind)) as engine:
        engine.save(tmp_path / "saved")
        engine.export(tmp_path / "exported")
        trained, store = in_split_store(engine)
        expected = {name: store.value(name).clone() for name in store.params}
        expected |= {
            f"{key} of {name}": ranges.whole().clone()
            for name in trained.steps
            for key, ranges in store.state_ranges(name).items()
        }
        checkpoints = Checkpoints()
        with engine.runtime.patches.caches_as_given():
            for name, background in (("split", False), ("background", True)):
                how: dict[str, Any] = dict(replace=False, only_model=False, extra=None, then=None)
                checkpoints.save(tmp_path / name, trained, num_steps=1, background=background, **how)
                checkpoints.finish()
                assert files(tmp_path / name) == files(tmp_path / "saved")
            checkpoints.export(tmp_path / "split-export", trained, tokenizer=None, fp32=False)
        assert files(tmp_path / "split-export") == files(tmp_path / "exported")

        store.clear()
        trained.steps.update(dict.fromkeys(trained.steps, 0))
        assert checkpoints.load(tmp_path / "saved", trained, only_model=False) == 1
        assert set(trained.steps.values()) == {1}
        found = {name: store.value(name) for name in store.params}
        for name in trained.steps:
            found |= {f"{key} of {name}": ranges.whole() for key, ranges in store.state_ranges(name).items()}
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

        step_on = {n: v.clone() for n, v in engine.model.state_dict().items()}
        with engine.gathered() as values:
            for value in values.values():
                value.zero_()
        engine.load(tmp_path / "split")
        assert all(torch.equal(v, step_on[n]) for n, v in engine.model.state_dict().items())


def test_one_range_of_a_tensor_is_viewed_and_two_are_copied() -> None:
    tensor = torch.arange(35.0).view(5, 7)
    assert Ranges.of(tensor).whole().data_ptr() == tensor.data_ptr()
    whole = split(tensor).whole()
    assert torch.equal(whole, tensor) and whole.is_contiguous()
    with pytest.raises(AssertionError, match="part of the tensor"):
        Ranges(tensor.shape, None, ((torch.zeros(5), 3),)).whole()


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (2, 3, 5), (0, 3)])
def test_ranges_are_read_and_written_in_the_order_of_the_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).permute(list(reversed(range(len(shape)))))
    ranges, key = split(tensor), "t"
    assert torch.equal(ranges.whole(), tensor)
    assert ranges.whole().stride() == tensor.stride() or not tensor.numel()
    with TensorFile.create(tmp_path / "f", {key: TensorSpec.of(tensor)}, {}) as file:
        ranges.write(file, key)
    ranges.copy_(torch.full((), 7.0))
    assert bool(ranges.whole().eq(7).all())
    with TensorFile(tmp_path / "f") as file:
        assert torch.equal(file.read(key), tensor)
        ranges.read(file, key)
    assert torch.equal(ranges.whole(), tensor)
    ranges.copy_(tensor * 2)
    assert torch.equal(ranges.whole(), tensor * 2)
