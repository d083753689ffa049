"""The form of a model kind in tests/kinds: how the model is built, what its batches look like, how its loss is made."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import timm_models
import torch
import zoo
from torch import Tensor, nn

from outsize.model.caches import turn_caches_off

VOCAB, HIDDEN, LABELS = zoo.VOCAB, zoo.HIDDEN, zoo.NUM_CLASSES
Rng = torch.Generator


@dataclass(frozen=True, kw_only=True)
class Family:
    build: Callable[[], nn.Module]
    """Imports what it needs: collecting the tests imports no model."""
    batch: Callable[[Rng], dict[str, Any]]
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    """None: the model returns its own."""
    refused: str = ""
    """What the error of `prepare` says. Empty: it trains."""
    needs_timm: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        # Fresh norms and biases are ones and zeros, which hide mistakes (zoo.make).
        with torch.no_grad():
            for parameter in dict(model.named_parameters()).values():
                if parameter.ndim == 1:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        turn_caches_off(model)  # as in training through outsize: a cache makes keys contiguous, which rounds otherwise
        return model.train()

    def data(self, count: int) -> list[dict[str, Any]]:
        return [self.batch(torch.Generator().manual_seed(100 + seed)) for seed in range(count)]


def hf(
    model: str,
    config: str,
    batch: Callable[[Rng], dict[str, Any]],
    loss: Any = None,
    refused: str = "",
    needs_timm: bool = False,
    **settings: Any,
) -> Family:
    """A transformers model by the names of its classes."""

    def build() -> nn.Module:
        import transformers

        with timm_models.without_torchvision() if needs_timm else nullcontext():
            return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return Family(build=build, batch=batch, loss=loss, refused=refused, needs_timm=needs_timm)


def tokens(rng: Rng, count: int = 12, rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, count), generator=rng)  # 0, 1 and 2 are pad, bos and eos


def causal(rng: Rng) -> dict[str, Any]:
    input_ids = tokens(rng)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def masked(rng: Rng) -> dict[str, Any]:
    """The last row is padded, so that masks matter."""
    input_ids = tokens(rng)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[-1, -3:] = 0
    return {
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "labels": input_ids.where(attention_mask.bool(), -100),
    }


def seq2seq(rng: Rng) -> dict[str, Any]:
    return {**masked(rng), "labels": tokens(rng, 8)}


def images(size: int = 16, rows: int = 2, channels: int = 3) -> Callable[[Rng], dict[str, Any]]:
    return lambda rng: {"pixel_values": torch.randn(rows, channels, size, size, generator=rng)}


def classified(size: int = 16, rows: int = 2) -> Callable[[Rng], dict[str, Any]]:
    return lambda rng: {**images(size, rows)(rng), "labels": torch.randint(0, LABELS, (rows,), generator=rng)}


def first_output_squared(model: nn.Module, batch: Any) -> Tensor:
    """Where the model has no loss of its own."""
    outputs = model(**batch)
    return (outputs if isinstance(outputs, Tensor) else outputs[0]).float().square().mean()
