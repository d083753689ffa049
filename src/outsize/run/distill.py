"""Runs with `teacher_model`: the loss is that of distillation, and the teacher runs forward under a plan of its own.

The teacher's layers are streamed as its plan says; if its last hidden states are known, only its head is needed. The
student's loss multiplies these with the teacher's head chunk by chunk, so the logits of neither model exist as a whole.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from outsize.base.errors import ConfigError, EngineMisuse, OutsizeError, PlanInfeasible
from outsize.base.units import parse_bytes, show_bytes
from outsize.config.run import RunConfig
from outsize.data.packing import keeps_documents_apart
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.integrations.hf import OutsizeMixin
from outsize.integrations.others import Planned, too_small
from outsize.loss.chunked_loss import ChunkedLossUnsupported, logit_steps
from outsize.loss.distillation import Lesson, Mixture, TeacherHead, teaching
from outsize.model.build import build_model
from outsize.model.packed_attention import VARLEN
from outsize.run.adapters import materialize, materialize_head
from outsize.run.distill_batches import TEACHER_BATCH, DistillBatches, HiddenReader
from outsize.run.teacher_hidden import TeacherHidden
from outsize.run.trainer import ForRuns
from outsize.setup.request import PrepareRequest

_NAME = "the teacher"


@dataclass(frozen=True)
class Teacher:
    backbone: nn.Module | None
    """Without the head. Gives the last hidden states. None: they are known."""
    head: TeacherHead
    hidden: TeacherHidden | None = None
    """Of all batches, if they are known."""


def load_teacher(config: RunConfig, vocab_size: int, batches: DistillBatches | None = None) -> Teacher:
    """`vocab_size`: the student's. `batches`: of a distillation after pruning. Its teacher has the overrides of the
    run's config; if the hidden states are known, only the head gets its weights.
    """
    assert config.teacher_model is not None
    dtype, attention = torch.bfloat16 if config.bf16 else torch.float32, config.attn_implementation
    hidden = None if batches is None else batches.hidden
    overrides: dict[str, Any] = {}
    if batches is not None:
        overrides = dict(overrides=config.overrides_of_model_config, rope_parameters=config.rope_parameters)
    try:
        built = build_model(config.teacher_model, dtype=dtype, attn_implementation=attention, **overrides)
        model = materialize(built) if hidden is None else materialize_head(built)
    except (OutsizeError, ImportError, ValueError) as error:
        raise ConfigError(f"teacher_model: {error}") from None
    model.requires_grad_(False).eval()
    backbone: Any = getattr(model, "base_model", None)
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if backbone is None or backbone is model or not isinstance(head, nn.Linear) or model.config.is_encoder_decoder:  # type: ignore[union-attr]
        raise ConfigError(
            f"teacher_model: {type(model).__name__} is no language model with one output head. Name another model."
        )
    if head.out_features < vocab_size:
        raise ConfigError(
            f"teacher_model: its vocabulary has {head.out_features} tokens, and that of base_model {vocab_size}. "
            "Distillation needs the same tokens. Name another model."
        )
    if (
        config.sample_packing
        and hidden is None
        and not keeps_documents_apart(model, head.out_features, rows=1, takes_boundaries=attention == VARLEN)
    ):
        raise ConfigError(
            f"teacher_model: in {type(model).__name__} the documents of a packed row attend to each other. Use "
            "sample_packing: false, or another attn_implementation."
        )
    bias = None if head.bias is None else head.bias.detach()[:vocab_size]
    found = TeacherHead(head.weight.detach()[:vocab_size], bias, _steps_of(model, backbone, head))
    return Teacher(backbone if hidden is None else None, found, hidden)


def _steps_of(model: Any, backbone: Any, head: nn.Linear) -> Any:
    """What the teacher does with its logits. Its forward runs with a stand-in for the layers, and is compared with the
    head alone.
    """
    hidden = torch.randn(1, 2, head.in_features, dtype=head.weight.dtype, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(1, 2, dtype=torch.long)
    backbone.forward = lambda *_, **__: _Outputs(hidden)
    try:
        steps = logit_steps(model, lambda: model(input_ids=tokens, labels=tokens))
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
    except ChunkedLossUnsupported as error:
        raise ConfigError(f"teacher_model: {error.reason}. Name another model.") from None
    finally:
        del backbone.forward
    found = TeacherHead(head.weight.detach(), None if head.bias is None else head.bias.detach(), steps).logits(hidden)
    if not torch.equal(found.to(expected.dtype), expected):
        raise ConfigError(
            f"teacher_model: the logits of {type(model).__name__} are not those of its head alone. Name another model."
        )
    return steps


@dataclass
class _Outputs:
    """Of a backbone: its last hidden states, and none of the other things that kinds of models return."""

    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class DistillTrainer(ForRuns, OutsizeMixin, Trainer):
    """Args beside those of `OutsizeMixin`: the teacher and the mixture of the losses.

    Evaluation computes the cross-entropy of the data.
    """

    def __init__(self, *args: Any, teacher: Teacher, mixture: Mixture, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "chunked_loss": True})
        self._teacher, self._mixture = teacher, mixture
        self._head: TeacherHead | None = None
        self._close_head: Callable[[], object] = lambda: None
        self._reader: HiddenReader | None = None
        self._beside_bytes = sum(part.nbytes for part in (teacher.head.weight, teacher.head.bias) if part is not None)
        if teacher.backbone is not None:
            self._others = {_NAME: teacher.backbone}
            self.accelerator.prepare_model(teacher.backbone, evaluation_mode=True)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        number = inputs.get(TEACHER_BATCH)
        inputs = {name: value for name, value in inputs.items() if name != TEACHER_BATCH}
        if not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        seen: Tensor
        if self._teacher.backbone is not None:
            with torch.no_grad():
                given = {name: value for name, value in inputs.items() if name != "labels"}
                seen = self._teacher.backbone(**given, use_cache=False).last_hidden_state
        else:
            assert self._reader is not None
            seen = self._reader.on_device(number, inputs["input_ids"].shape)
        assert self._head is not None
        lesson = Lesson(seen, self._head, self._mixture)
        with teaching(lesson):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not lesson.is_used:
            raise EngineMisuse("The student computed its own loss instead of that of distillation.")
        return loss

    # The teacher's head is outside of its plan, and all of the teacher if its hidden states are known.

    def _beside_others(
        self, batch: dict[str, Any], request: PrepareRequest, plan: Callable[[PrepareRequest], Planned]
    ) -> Planned:
        if self._teacher.hidden is None:
            return super()._beside_others(batch, request, plan)
        self._stop_others()
        device = self._place_head(request)
        self._reader = HiddenReader(self._teacher.hidden, device)
        gpu, host = self.others_bytes = (self._beside_bytes, self._reader.host_bytes)
        left = replace(request, gpu_memory=_less(request.gpu_memory, gpu), host_memory=_less(request.host_memory, host))
        try:
            return plan(left)
        except PlanInfeasible as error:
            self._stop_others()
            taken = gpu if error.resource == "gpu" else host
            what = "head needs" if error.resource == "gpu" else "hidden states need"
            words = (
                f"{_NAME}'s {what} {show_bytes(taken)}, the trained model {show_bytes(error.needed_bytes)}, together"
            )
            raise too_small(error, words, taken, request) from None
        except BaseException:
            self._stop_others()
            raise

    def _start_others(self, batch: dict[str, Any], request: PrepareRequest, *, least: bool) -> None:
        super()._start_others(batch, request, least=least)
        self._place_head(request)

    def _place_head(self, request: PrepareRequest) -> Device:
        """Its memory is a budget of its own on the device, beside those of the engines."""
        device, head = choose_device(request.device), self._teacher.head
        device.count_anew()
        device.open(id(self), self._beside_bytes)
        self._close_head = weakref.finalize(self, device.close, id(self))
        self._head = replace(
            head, weight=device.keep(head.weight), bias=None if head.bias is None else device.keep(head.bias)
        )
        return device

    def _stop_others(self) -> None:
        super()._stop_others()
        self._head = None
        self._close_head()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _less(memory: str | int | None, taken: int) -> int | None:
    """None stays None: free memory then decides."""
    return None if memory is None else max(1, parse_bytes(memory, name="memory") - taken)


def distill_trainer(config: RunConfig, batches: DistillBatches | None = None, **given: Any) -> DistillTrainer:
    """`batches`: of a distillation after pruning. `given`: arguments of the Trainer and of `OutsizeMixin`."""
    vocab_size = given["model"].config.get_text_config().vocab_size
    mixture = Mixture(config.kd_alpha, config.kd_temperature)
    return DistillTrainer(teacher=load_teacher(config, vocab_size, batches), mixture=mixture, **given)
