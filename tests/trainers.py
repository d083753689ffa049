"""Trainers for tests: ours under some plan, and transformers' own with the reference optimizer, which ours must equal
to the bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zoo
from cells import Outcome
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.integrations.hf import OutsizeMixin, OutsizeTrainer
from outsize.reference import AdamW as Reference
from outsize.schedule.pins import Pins

CHUNK_BYTES = 16 * 1024
MAX_GRAD_NORM = 0.5
"""Below the norm of every zoo model here, so that clipping clips."""
PINS: dict[str, Pins | None] = {
    "resident": None,
    "streamed": Pins(n_persist=0, n_buffer=2, n_optimizer_gpu=0),
    "mixed": Pins(n_persist=2, n_buffer=1, n_checkpoint=1, n_swap=1, n_offload=1),
}
"""Plans that have nothing in common but the model. Resident: on `cpu`; the others on `sim`, which refuses races and a
byte too many.
"""


def rows(kind: str = "llama", count: int = 8, tokens: int = 16, first: int = 0) -> list[dict[str, Tensor]]:
    return [
        {name: value[0] for name, value in zoo.batch(kind, size=1, tokens=tokens, seed=i).items()}
        for i in range(first, first + count)
    ]


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    """Four steps of two rows."""
    usual: dict[str, Any] = dict(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return TrainingArguments(**{**usual, **given})


def machine(num_bytes: int = 2**30) -> SimDevice:
    return SimDevice(lookup(f"{num_bytes}B"))


def planned(plan: str, *, gpu: bool = False) -> dict[str, Any]:
    """What our Trainers are given beside their own arguments."""
    return {
        "device": "cuda" if gpu else "cpu" if plan == "resident" else machine(),
        "pins": PINS[plan],
        "chunk_bytes": CHUNK_BYTES,
    }


def ours(
    folder: Path,
    *,
    kind: str = "llama",
    plan: str = "resident",
    model: Any = None,
    args: dict[str, Any] | None = None,
    **given: Any,
) -> OutsizeTrainer:
    """`args`: of TrainingArguments."""
    if model is None and "model_init" not in given:
        model = zoo.make(kind)
    given.setdefault("train_dataset", rows(kind))
    return OutsizeTrainer(model=model, args=arguments(folder, **args or {}), **{**planned(plan), **given})


@contextmanager
def closing(trainer: Any) -> Iterator[Any]:
    """An engine must not outlive its test."""
    try:
        yield trainer
    finally:
        trainer.stop_engine()


class WithReference:
    """Before a Trainer class: the reference optimizer, in the Trainer's own groups. Clipping is the optimizer's, as it
    is the engine's.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        given: TrainingArguments = kwargs["args"]
        self._clip, given.max_grad_norm = given.max_grad_norm or None, 0.0
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        me: Any = self
        if me.optimizer is None:
            decay, args = me.get_decay_parameter_names(me.model), me.args
            named = [(name, p) for name, p in me.model.named_parameters() if p.requires_grad]
            groups = [
                ([(n, p) for n, p in named if n in decay], args.weight_decay),
                ([(n, p) for n, p in named if n not in decay], 0.0),
            ]
            me.optimizer = Reference(
                [{"params": members, "weight_decay": decay} for members, decay in groups if members],
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                max_grad_norm=self._clip,
            )
        return me.optimizer


class PlainTrainer(WithReference, Trainer):
    """What ours must equal."""


class Norms(TrainerCallback):
    """Of every step, before clipping."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.seen: list[float] = []

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        self.seen.append(
            float(
                trainer.engine.grad_norm if isinstance(trainer, OutsizeMixin) else trainer.optimizer.optimizer.grad_norm
            )
        )


def train(trainer: Any, **how: Any) -> Outcome:
    """Losses as logged, and what came of it."""
    norms = Norms(trainer)
    trainer.add_callback(norms)
    trainer.train(**how)
    trainer.remove_callback(norms)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    names = {name for name, _ in trainer.model.named_parameters()}
    weights = {
        name: value.detach().cpu().clone() for name, value in trainer.model.state_dict().items() if name in names
    }
    saved = trainer.optimizer.state_dict()
    order = [name for group in saved["param_groups"] for name in group["param_names"]]
    state = {
        order[i]: {key: torch.as_tensor(v).detach().cpu().clone() for key, v in s.items()}
        for i, s in saved["state"].items()
    }
    return Outcome(losses, norms.seen, weights, state)


def logged(trainer: Any) -> list[dict[str, Any]]:
    """The log without what a clock says. Norms are compared elsewhere: ours are fp64 sums."""
    left_out = ("runtime", "per_second", "preparation_time", "grad_norm")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in left_out)}
        for entry in trainer.state.log_history
    ]
