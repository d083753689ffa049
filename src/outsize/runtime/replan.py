"""Parts of a re-plan: decides whether the plan holds for a model call, and carries gradients to the next plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outsize.base.errors import EngineMisuse
from outsize.base.log import log
from outsize.model.batch import ModelCall, arguments_of, fits
from outsize.model.tensors import named_tensors
from outsize.runtime.plan_runtime import PlanRuntime


def needs_new_plan(runtime: PlanRuntime, call: ModelCall, names: tuple[str, ...]) -> bool:
    """Whether the plan does not hold for a call (see [Note: When a batch fits] in model/batch.py), or parameters were
    unfrozen. `names`: the arguments of the model's forward.
    """
    arguments = arguments_of(call, names)
    _require_nonempty(arguments)
    if unfrozen := runtime.unfrozen():
        _require_trainable(runtime, unfrozen)
        log.info("%s and %d more parameters were unfrozen: planning again", unfrozen[0], len(unfrozen) - 1)
        return True
    if fits(runtime.planned.signatures(names), arguments):
        return False
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(arguments)}
    log.info("the plan for %s does not hold for a batch of %s: planning again", runtime.plan.inputs, shapes)
    return True


def _require_trainable(runtime: PlanRuntime, names: list[str]) -> None:
    for name in names:
        dtype = runtime.planned.graph.param[name].dtype
        if dtype not in ("bfloat16", "float32"):
            raise EngineMisuse(
                f"{name} was unfrozen, but it is {dtype}, which is trained in float32: its dtype must change. "
                "Call engine.detach() and prepare the model again."
            )


def _require_nonempty(arguments: dict[str, Any]) -> None:
    """Models fail in many ways on an empty batch. Beside text, other inputs may be empty: the boxes of a page, the
    images of a row.
    """
    given = {name: tensor for name, tensor in named_tensors(arguments) if tensor.dim()}
    batch = {"input_ids": given["input_ids"]} if "input_ids" in given else given
    if batch and not any(tensor.numel() for tensor in batch.values()):
        found = "; ".join(
            f"{f'argument {name}' if name.isdigit() else name} is {' × '.join(map(str, tensor.shape))}"
            for name, tensor in batch.items()
        )
        raise EngineMisuse(
            f"The batch is empty: {found}. Skip empty batches; check the dataset and the collator, which made this one."
        )


@dataclass(frozen=True, slots=True)
class CarriedGradients:
    """The accumulated gradients between two plans, on the host."""

    pending: dict[str, Tensor]
    norm: Tensor
    is_applied: bool
    is_consumed: bool

    @staticmethod
    def of(runtime: PlanRuntime) -> "CarriedGradients":
        gradients = runtime.gradients
        gradients.make_zeros()
        gradients.pull_assigned()
        with runtime.device.on_host():
            pending = {name: gradients.pending(name).detach().cpu().clone() for name in gradients.accumulated}
            norm = gradients.total.detach().cpu().clone()
        return CarriedGradients(pending, norm, gradients.is_applied, gradients.is_consumed)

    def restore(self, runtime: PlanRuntime) -> None:
        gradients = runtime.gradients
        gradients.restore(self.pending)
        gradients.total.copy_(self.norm)
        gradients.is_applied, gradients.is_consumed = self.is_applied, self.is_consumed


@contextmanager
def requiring_grad(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Keep parameters with optimizer state in the plan, though they may be frozen now."""
    frozen = [param for name, param in model.named_parameters() if name in names and not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)
