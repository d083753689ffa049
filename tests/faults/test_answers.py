"""Questions that cannot be answered as they are asked: each gets a sentence that says what was expected, what was found and what to do."""

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import outsize
from outsize.base.errors import ConfigError, PlanInfeasible

KIND = "llama"


def llama() -> nn.Module:
    return zoo.make(KIND, torch.bfloat16)


def test_a_batch_that_is_too_large_for_any_plan_says_how_much_it_takes_and_that_it_is_the_batch() -> None:
    ids = zoo.batch(KIND)["input_ids"].repeat(16, 4)
    with pytest.raises(PlanInfeasible, match=r"at least .* of GPU memory, but 300KiB is allowed .*a smaller batch or a shorter sequence helps most") as no:
        outsize.prepare(llama(), {"input_ids": ids, "labels": ids}, device="sim:300KiB")
    assert no.value.resource == "gpu" and no.value.needed_bytes > 300 * 1024


def test_a_host_that_is_too_small_says_how_much_it_takes_there_and_what_a_larger_gpu_would_change() -> None:
    with pytest.raises(PlanInfeasible, match=r"of host memory, but 10KiB is allowed .* or allow .* of GPU memory") as no:
        outsize.prepare(llama(), zoo.batch(KIND), device="sim:300KiB", host_memory="10KiB")
    assert no.value.resource == "host"


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "input_ids is 2 × 0"), ({"input_ids": torch.zeros(0, 8, dtype=torch.long)}, "input_ids is 0 × 8"),
        ({}, "it holds no tensors"), ({"input_ids": [[1, 2]]}, "it holds no tensors"),
    ],
)  # fmt: skip
def test_a_batch_of_nothing_is_refused_before_the_model_breaks_off(batch: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"a batch to plan for has rows and tokens, but {found}"):
        outsize.prepare(llama(), batch, device="sim:64MiB")


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
