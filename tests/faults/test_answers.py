"""Questions that cannot be answered as they are asked: each gets a sentence that says what was expected, what was found
and what to do.
"""

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

import outsize
import outsize.reference
from outsize.base.errors import ConfigError, DeviceOutOfMemory, EngineMisuse, PlanInfeasible
from outsize.model.weights import is_unmaterialized
from outsize.run.random_weights import RandomWeights, random_model
from outsize.run.shapes import SHAPES, shape_config
from outsize.setup.prepare import preview

pytestmark = pytest.mark.usefixtures("_profiles_anew")

KIND = "llama"


def llama() -> nn.Module:
    return zoo.make(KIND, torch.bfloat16)


def test_a_batch_that_is_too_large_for_any_plan_says_how_much_it_takes_and_that_it_is_the_batch() -> None:
    ids = zoo.batch(KIND)["input_ids"].repeat(16, 4)
    with pytest.raises(
        PlanInfeasible,
        match=r"gpu_memory 300 KiB is too small: .* at least .* of it activations\)\. Raise .* reduce the batch size",
    ) as no:
        outsize.prepare(llama(), {"input_ids": ids, "labels": ids}, device="sim:300KiB")
    assert no.value.resource == "gpu" and no.value.needed_bytes > 300 * 1024


def test_a_host_that_is_too_small_says_how_much_it_takes_there_and_what_a_larger_gpu_would_change() -> None:
    with pytest.raises(
        PlanInfeasible, match=r"host_memory 10 KiB is too small: .* at least .* or raise gpu_memory to"
    ) as no:
        outsize.prepare(llama(), zoo.batch(KIND), device="sim:300KiB", host_memory="10KiB")
    assert no.value.resource == "host"


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "input_ids is 2 × 0"),
        ({"input_ids": torch.zeros(0, 8, dtype=torch.long)}, "input_ids is 0 × 8"),
        ({}, "it holds no tensors"),
        ({"input_ids": [[1, 2]]}, "it holds no tensors"),
    ],
)
def test_a_batch_of_nothing_is_refused_before_the_model_breaks_off(batch: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"batch: {found}, and a plan needs rows and tokens"):
        outsize.prepare(llama(), batch, device="sim:64MiB")


@pytest.mark.parametrize("cut", [(slice(None), slice(0)), (slice(0), slice(None))])
def test_a_batch_of_nothing_in_the_midst_of_training_is_refused_and_training_continues(
    cut: tuple[slice, slice],
) -> None:
    losses = []
    for with_nothing in (False, True):
        model, batch = llama(), zoo.batch(KIND)
        engine = outsize.prepare(model, batch, device="sim:64MiB")
        for _ in range(2):
            if with_nothing:
                with pytest.raises(EngineMisuse, match=r"The batch is empty: input_ids is (2 × 0|0 × 16)"):
                    model(**{name: value[cut] for name, value in batch.items()})
            loss = model(**batch).loss
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        engine.detach()
    assert losses[:2] == losses[2:]


class Page(nn.Module):
    """Of tokens without rows, and boxes that a page may have none of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.boxes = nn.Linear(4, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids) + self.boxes(boxes).sum(0)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


def test_what_goes_with_text_may_be_nothing() -> None:
    model, ids = Page(), torch.arange(12)
    engine = outsize.prepare(model, {"ids": ids, "labels": ids, "boxes": torch.randn(3, 4)}, device="sim:64MiB")
    model(ids=ids, labels=ids, boxes=torch.zeros(0, 4))["loss"].backward()
    engine.optimizer.step()
    with pytest.raises(EngineMisuse, match="ids is 0; labels is 0; boxes is 0 × 4"):
        model(ids[:0], ids[:0], torch.zeros(0, 4))
    engine.close()


def test_a_largest_shape_may_be_of_numpys_numbers() -> None:
    planned = preview(llama(), zoo.batch(KIND), device="sim:64MiB", max_shape=(2, np.int64(20)))
    assert planned.plan.inputs["input_ids"] == (2, 20)


@pytest.mark.parametrize("shape", [(2, 0), (-1, 16), (2,), 16, (2.0, 16)])
def test_a_largest_shape_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(ConfigError, match="max_shape must be the rows and tokens of the largest batch, not"):
        outsize.prepare(llama(), zoo.batch(KIND), device="sim:64MiB", max_shape=shape)


class Full(RandomWeights):
    """As if the device were full before the first layer runs."""

    def read_into(self, name: str, tensor: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_weights_that_do_not_even_fit_a_trial_leave_the_model_as_it_was() -> None:
    """Embedding and head are brought to the device before anything runs: a card may be too small for them alone."""
    model, _ = random_model(shape_config(SHAPES["tiny"]))
    config: Any = model.config
    config.use_cache = True
    param = next(model.parameters())
    param.grad = torch.ones(param.shape, dtype=param.dtype)
    ids = torch.ones(2, 16, dtype=torch.long)
    with pytest.raises(DeviceOutOfMemory, match="it ran out at the weights outside of layers"):
        outsize.prepare(model, {"input_ids": ids, "labels": ids}, device="sim:64MiB", weights=Full())
    assert (
        config.use_cache and param.grad is not None and is_unmaterialized(param) and torch.is_autocast_cache_enabled()
    )


def test_t5_trains_with_its_cache_on_by_default() -> None:
    """Its decoder has a config of its own."""
    model = zoo.make("t5", torch.float32)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = True
    engine = outsize.prepare(model, zoo.batch("t5"), device="sim:64MiB", pins=outsize.Pins(n_checkpoint=2))
    engine.model(**zoo.batch("t5")).loss.backward()
    engine.optimizer.step()
    engine.detach()
    assert model.config.use_cache and model.decoder.config.use_cache


class WithoutLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(torch.relu(self.first(x))).square().mean()}


def test_a_model_without_repeated_blocks_trains_as_one_block_to_the_plain_loops_bits() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    plain = WithoutLayers()
    reference = outsize.reference.AdamW(plain.parameters(), lr=1e-2)
    engine = outsize.prepare(WithoutLayers(), {"x": x}, optimizer=outsize.AdamW(lr=1e-2), device="sim:1MiB")
    for _ in range(3):
        losses = []
        for model, optimizer in ((plain, reference), (engine.model, engine.optimizer)):
            loss = model(x=x)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), engine.model.parameters(), strict=True))
