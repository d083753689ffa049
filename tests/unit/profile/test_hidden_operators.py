"""Operators of other libraries that read weights are named, if what they allocate inside is unknown."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import outsize

NAME = "outsize_tests::scaled"


@pytest.fixture(scope="module", autouse=True)
def operator() -> Iterator[None]:
    scaled = torch.library.custom_op(
        NAME, lambda x, weight: x * weight, mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor"
    )
    scaled.register_fake(lambda x, weight: torch.empty_like(x))
    scaled.register_autograd(lambda ctx, grad: (grad, None))
    yield


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.ops.outsize_tests.scaled(self.linear(x), self.scale))


@pytest.mark.parametrize("layer", [Scaled, nn.Linear])
def test_an_operator_that_reads_a_weight_and_is_in_no_table_is_named(
    layer: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    made = [Scaled() if layer is Scaled else nn.Linear(8, 8) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 8), *made)
    engine = outsize.prepare(model, (torch.ones(4, 8),), device="sim:16MiB")
    engine.detach()
    warned = [record.message for record in caplog.records if NAME in record.message]
    assert [text.partition(":")[0] for text in warned] == (["outsize_tests"] if layer is Scaled else [])
    assert all("What they allocate inside is not counted here" in text for text in warned)
