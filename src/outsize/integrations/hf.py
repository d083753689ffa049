"""outsize in transformers' Trainer: `OutsizeTrainer`, and `OutsizeMixin` for other Trainer classes (TRL's SFTTrainer).

Trainer runs the loop. The model is prepared from the first batch before the optimizer exists; the engine provides the
optimizer, clipping, saving and loading. The mixin keeps Trainer and accelerate from moving the model or the optimizer
state to the GPU.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer
from transformers.training_args import TrainingArguments

from outsize.base.errors import ConfigError, DeviceOutOfMemory, EngineMisuse
from outsize.base.log import log
from outsize.checkpoint.folder import is_plain, read_manifest
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.device.rng import rewinder, rng_untouched
from outsize.integrations import plain
from outsize.integrations.arguments import (
    NonFinite,
    loads_reference,
    optimizer_of,
    refuse_trainer,
    take_over,
    update_mode,
)
from outsize.integrations.checkpointing import CheckpointMixin
from outsize.integrations.longest_row import longest_row
from outsize.integrations.online import Generates
from outsize.integrations.others import OtherModel, RunsOthers, without_autocast_cache
from outsize.integrations.peek import Rewound, first_batch, rewindable
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.batch import fits
from outsize.model.strategies import TILE_TOKENS
from outsize.model.weights import Weights
from outsize.optim.method import MethodSpec
from outsize.runtime.engine import Engine, PlannedModel
from outsize.runtime.retry import with_retries
from outsize.schedule.pins import Pins
from outsize.schedule.plan import Plan
from outsize.schedule.render import render
from outsize.setup.prepare import preview_as
from outsize.setup.request import PrepareRequest

_ENGINES: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()
"""Engines by model. The next Trainer of the same model ends its engine."""


class OutsizeMixin(CheckpointMixin, RunsOthers, Generates):
    """Put it before a Trainer class: `class MyTrainer(OutsizeMixin, SFTTrainer): pass`.

    Args beside the Trainer's own, as in `outsize.prepare`:
        gpu_memory, host_memory, device, pins, plan, chunk_bytes, blocks, weights, chunked_loss, tile_tokens,
            method.
        sequence_len: the longest row, which the plan is for. Default: `args.max_length` if there is one, else the
            length of the first batch.
        plan_batch: a batch to plan for, instead of the first one.
        nonfinite: what a step does when a gradient is not finite: "raise", or "skip" the step. Neither changes weights.
    """

    model: Any
    optimizer: Any
    num_tokens_seen = 0
    """Tokens trained on, padding included."""
    num_rows_seen = 0
    shows_plan = True
    """Whether `train` prints the plan."""
    _engine: Engine | None = None
    _stream: Rewound | None = None
    """The training data, if they are a stream."""
    _inputs: dict[str, Any] | None = None
    """Inputs of the current micro-batch."""
    _earlier: tuple[Callable[[], None], ...] = ()
    """Functions that repeat the step's earlier micro-batches, whose gradients wait for `step()`."""

    def __init__(
        self,
        *args: Any,
        gpu_memory: str | int | None = None,
        host_memory: str | int | None = None,
        device: str | Device | None = None,
        pins: Pins | None = None,
        plan: Plan | str | Path | None = None,
        sequence_len: int | None = None,
        plan_batch: dict[str, Any] | None = None,
        chunk_bytes: str | int = DEFAULT_CHUNK_BYTES,
        blocks: list[str] | None = None,
        weights: str | Path | Weights | None = None,
        chunked_loss: bool | None = None,
        tile_tokens: int = TILE_TOKENS,
        method: MethodSpec | None = None,
        nonfinite: NonFinite = "raise",
        **kwargs: Any,
    ):
        given = _by_name(super().__init__, args, kwargs)
        refuse_trainer(type(self))
        if isinstance(given.get("args"), TrainingArguments):
            take_over(
                given["args"],
                optimizers=given.get("optimizers"),
                optimizer_cls_and_kwargs=given.get("optimizer_cls_and_kwargs"),
            )
            # By default TRL loads models that are given by name, and reference models, onto the GPU.
            is_loaded = isinstance(given.get("model"), str) or loads_reference(type(self), given)
            if is_loaded and hasattr(given["args"], "model_init_kwargs"):
                given["args"].model_init_kwargs = {"device_map": None, **(given["args"].model_init_kwargs or {})}
        self._prepare_request = PrepareRequest(
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            device=device,
            pins=pins,
            plan=plan,
            chunk_bytes=chunk_bytes,
            blocks=blocks,
            weights=weights,
            chunked_loss=chunked_loss,
            tile_tokens=tile_tokens,
            method=method,
        )
        self._sequence_len, self._plan_batch, self._nonfinite = sequence_len, plan_batch, nonfinite
        super().__init__(*args, **kwargs)
        take_over(
            self.args,
            optimizers=(self.optimizer, self.lr_scheduler),
            optimizer_cls_and_kwargs=self.optimizer_cls_and_kwargs,
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError(
                "accelerate was started with deepspeed or fsdp, but outsize places weights and optimizer state itself. "
                "Start the script with python, or with another accelerate config."
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the engine places the model."""

    # Starting and ending the engine.

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineMisuse("The model is not prepared before train() or evaluate(). Call start_engine() first.")
        return self._engine

    def start_engine(self, dataloader: Any = None) -> Engine:
        """Plan for the first batch of a loader (default: the training data's) and prepare the model. Training and
        evaluation call this.
        """
        self.stop_engine()
        if (other := _ENGINES.pop(self.model, lambda: None)()) is not None and _is_attached(other):
            log.info("the engine of an earlier Trainer is detached from the model")
            other.detach()
        self._engine = self._prepare_with_others(*self._preparation(dataloader))
        _ENGINES[self.model] = weakref.ref(self._engine)
        if self.model_init is None:
            self._prepare_request = replace(self._prepare_request, weights=None)  # they are in the model now
        return self._engine

    def stop_engine(self) -> None:
        """Make the model a plain one on the CPU. The next use prepares it again, with a new optimizer."""
        engine, self._engine, self.optimizer = self._engine, None, None
        if engine is not None and _is_attached(engine):
            engine.detach()
        self._stop_others()

    def preview(self, dataloader: Any = None) -> PlannedModel:
        """Plan without preparing the model."""
        if self._has_engine:
            return self.engine.runtime.planned
        batch, request = self._preparation(dataloader)
        try:
            return self._beside_others(batch, request, lambda left: preview_as(self.model, batch, left))
        finally:
            self._stop_others()

    @property
    def _has_engine(self) -> bool:
        """Whether there is an engine for this model: `model_init` makes another model for each run."""
        return self._engine is not None and self._engine.model is self.model and _is_attached(self._engine)

    def _renew_engine(self, dataloader: Any) -> None:
        """Prepare again for changed arguments, with the same optimizer state."""
        if self.engine.runtime.coordinates.names and self.engine.num_steps:
            raise ConfigError(
                "gradient_accumulation_steps or max_grad_norm: changed after the model was trained with a method such "
                "as OSFT, whose optimizer state belongs to the weights that training began with. Set it back, or call "
                "stop_engine() to begin another task with the trained weights."
            )
        given_dtypes = self.engine.given_dtypes
        state = self.engine.detach(as_trained=True)  # rounding to fp16 would change master weights
        engine = self.start_engine(dataloader)
        engine.given_dtypes = given_dtypes
        engine.optimizer.load_state_dict(state)

    # Preparing.

    def _preparation(self, dataloader: Any) -> tuple[dict[str, Any], PrepareRequest]:
        """The batch and the settings to plan for."""
        device = self._chosen_device()
        with rng_untouched(device):
            batch = self._batch_to_plan_for(dataloader)
        self.model.train()
        # accelerate's autocast wraps the model's forward. Before profiling, so that its casts are measured.
        without_autocast_cache(self.accelerator)
        self.accelerator.prepare_model(self.model, device_placement=False)
        names = [name for name, param in self.model.named_parameters() if param.requires_grad]
        return batch, replace(
            self._prepare_request,
            optimizer=optimizer_of(self.args, self.get_decay_parameter_names(self.model), names, self._nonfinite),
            device=device,
            accumulate=self.args.gradient_accumulation_steps,
            max_shape=self._largest_shape,
            loss=None if self._is_plain_loss else self._trial_loss,
        )

    def _chosen_device(self) -> Device:
        device = choose_device(self._prepare_request.device or self.args.device.type)
        if device.torch_device.type != self.args.device.type:
            raise ConfigError(
                f"device={self._prepare_request.device}: the Trainer puts its batches on {self.args.device}. Give "
                "TrainingArguments(use_cpu=True) for cpu and sim, or leave device out."
            )
        return device

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """TRL runs the reference model over a dataset, perhaps in its constructor. It gets an engine for that."""
        model = getattr(self, "ref_model", None) or self.model
        if self._has_engine if model is self.model else bool(self._running):
            return super()._precompute_ref_logps(dataset, name, batch_size)
        device = self._chosen_device()
        without_autocast_cache(self.accelerator)
        with rng_untouched(device):
            batch = self.data_collator([row for row, _ in zip(dataset, range(batch_size), strict=False)])
            request = replace(self._prepare_request, device=device, max_shape=self._largest_shape)
            other = OtherModel(model, "the reference model", batch, request)
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            other.stop()

    def _batch_to_plan_for(self, dataloader: Any) -> dict[str, Any]:
        if self._plan_batch is not None:
            batch = dict(self._plan_batch)
        else:
            batch = self._tensors_of(first_batch(dataloader if dataloader is not None else self.get_train_dataloader()))
        return self._as_in_training(batch)

    def _as_in_training(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._with_num_items(batch, self._get_num_items_in_batch([batch], torch.device("cpu")))

    @staticmethod
    def _with_num_items(batch: dict[str, Any], num_items: Any) -> dict[str, Any]:
        return batch if num_items is None else {**batch, "num_items_in_batch": num_items}

    @property
    def _largest_shape(self) -> tuple[int, int] | None:
        """(rows, tokens) of the largest training batch, if the arguments define it."""
        tokens: int | None = self._sequence_len or getattr(self.args, "max_length", None)
        if tokens is None or self.train_dataset is None:
            return None
        if self._sequence_len is None and hasattr(self.model, "config"):
            # max_length may be a default of TRL's, larger than the model's number of positions.
            tokens = min(
                tokens, getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or tokens
            )
        if self._sequence_len is None and (longest := longest_row(self.train_dataset)) is not None:
            multiple = getattr(self.args, "pad_to_multiple_of", None) or 1
            tokens = min(tokens, -(-longest // multiple) * multiple)
        rows = self.args.per_device_train_batch_size
        is_flat = getattr(self, "padding_free", False) or isinstance(self.data_collator, DataCollatorWithFlattening)
        return (1, rows * tokens) if is_flat else (rows, tokens)

    @property
    def _is_plain_loss(self) -> bool:
        """Whether the model computes the loss itself: then nothing outside the model allocates."""
        return (
            type(self).compute_loss is Trainer.compute_loss
            and self.label_smoother is None
            and self.compute_loss_func is None
        )

    def _trial_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The loss as in training, without changing the Trainer's counters."""
        inputs = self._scored(batch) if self._is_online else self._prepare_inputs(self._inputs_of(batch))
        num_items = None if self._is_online else inputs.pop("num_items_in_batch", None)
        with self._counting_in_copies():
            self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            return self.compute_loss(model, inputs, num_items_in_batch=num_items)

    @contextmanager
    def _counting_in_copies(self) -> Iterator[None]:
        counts = {
            name: value for name, value in vars(self).items() if not name.endswith("_dataset") and _is_plain(value)
        }
        self.__dict__.update(deepcopy(counts))
        try:
            yield
        finally:
            self.__dict__.update(counts)

    def _inputs_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The inputs of the loss. Within a step the engine re-plans for the inputs of the model's forward, which may be
        fewer or more.
        """
        mine = self._inputs
        if mine is None:
            return dict(batch)
        is_whole = mine.keys() - {"num_items_in_batch"} <= batch.keys()
        return {name: batch.get(name, value) if is_whole else value for name, value in mine.items()}

    # Training, in the order of Trainer's calls.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        take_over(self.args)
        if resume_from_checkpoint is True:
            found = plain.newest_of_both(Path(self.args.output_dir))
            if found is None:
                raise ConfigError(
                    f"resume_from_checkpoint: there is no complete checkpoint in {self.args.output_dir}. Start without "
                    "resume_from_checkpoint, or name the folder."
                )
            resume_from_checkpoint = str(found)
        if resume_from_checkpoint and is_plain(Path(resume_from_checkpoint)):
            plain.require_plain(Path(resume_from_checkpoint))
        elif resume_from_checkpoint:
            read_manifest(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # Not with workers, which have copies of the dataset.
        if not self.args.dataloader_num_workers:
            if self._stream is not None and self._stream.dataset is dataset:
                dataset = self._stream
            elif isinstance(stream := rewindable(dataset), Rewound):
                dataset = stream
                self._stream = stream if stream.dataset is self.train_dataset else self._stream
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if not self._has_engine:
            self._use_loss_of(resume_from_checkpoint)
            planned = self.start_engine(train_dataloader).runtime.planned
            if self.shows_plan and self.is_world_process_zero():
                print(render(planned.plan, planned.graph, planned.layout))
        elif (step_config := self.engine.plan.step_config).update != update_mode(
            self.args, self._nonfinite
        ) or step_config.accumulate != self.args.gradient_accumulation_steps:
            self._renew_engine(train_dataloader)
        placement = self.accelerator.device_placement
        self.accelerator.device_placement = False
        try:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        finally:
            self.accelerator.device_placement = placement
        if getattr(self.optimizer, "optimizer", self.optimizer) is not self.engine.optimizer:
            raise ConfigError(
                f"create_optimizer: it returned {type(self.optimizer).__name__}, but the optimizer is the engine's. Do "
                "not override create_optimizer; get_decay_parameter_names decides the groups."
            )
        return prepared

    def _use_loss_of(self, checkpoint: str | None) -> None:
        """Keep the chunked loss of a run that switched to it at a large batch, also if no such batch follows soon."""
        if checkpoint is None or is_plain(Path(checkpoint)) or self._prepare_request.chunked_loss is not None:
            return
        if read_manifest(Path(checkpoint)).get("loss_chunk"):
            self._prepare_request = replace(self._prepare_request, chunked_loss=True)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = self.engine.optimizer
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
        if isinstance(ids, Tensor):
            self.num_tokens_seen += ids.numel()
            self.num_rows_seen += ids.shape[0]
        batch = self._planned_for if self._is_online else self._with_num_items(inputs, num_items_in_batch)
        is_last, generated = self.accelerator.sync_gradients, self._generated()
        if not self.engine.runtime.gradients.waiting:
            self._earlier = ()  # the step was completed or abandoned
        self._fit(batch)
        rewind = rewinder(self.engine.device)

        def make() -> Tensor:
            # A repeated micro-batch runs during a later one.
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            self._inputs = None if self._is_online else batch
            try:
                with self.engine.last_backward() if is_last else nullcontext():
                    return super(OutsizeMixin, self).training_step(model, inputs, num_items_in_batch)
            finally:
                self._inputs = None

        def repeat() -> None:
            self._fit(batch)
            rewind()
            with self._counting_in_copies(), self._generated_again(generated):
                make()

        try:
            loss = with_retries(self.engine, make, batch, self._earlier)
        except DeviceOutOfMemory as error:
            if self.engine.is_half_updated:
                raise DeviceOutOfMemory(f"{error} {self._resume_advice()}") from None
            raise
        self._earlier = () if is_last else (*self._earlier, repeat)
        return loss

    def _fit(self, batch: dict[str, Any]) -> None:
        """Re-plan for a larger batch if the Trainer computes the loss; otherwise the engine does so."""
        if self._is_plain_loss or self._is_online:
            return
        planned = self.engine.runtime.planned
        if not fits(planned.batches(), batch):
            shapes = {name: tuple(t.shape) for name, t in batch.items() if isinstance(t, Tensor)}
            log.info("the plan for %s does not hold for a batch of %s: planning again", planned.plan.inputs, shapes)
            self.model.train()
            self.engine.replan(batch, self.engine.plan.step_config)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.engine.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._has_engine:
            self.start_engine(None if self.train_dataset is not None else dataloader)
        try:
            with rng_untouched(self.engine.device):  # creating an iterator draws a random number
                return super().evaluation_loop(dataloader, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(
                f"per_device_eval_batch_size={self.args.per_device_eval_batch_size}: evaluation ran out of device "
                f"memory (training has {self.args.per_device_train_batch_size} rows). Lower it."
            ) from error

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.finish_saving()
        self._drop_waiting_gradients()
        return super()._finalize_training(*args, **kwargs)


class OutsizeTrainer(OutsizeMixin, Trainer):
    """transformers' Trainer under a memory budget: `OutsizeTrainer(model=..., args=..., train_dataset=...,
    gpu_memory="24GiB")`.
    """


def _by_name(init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, as far as the signature has names."""
    parameters = inspect.signature(init).parameters.values()
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(positional, args, strict=False)), **kwargs}


def _is_attached(engine: Engine) -> bool:
    try:
        return bool(engine.runtime)
    except EngineMisuse:
        return False


def _is_plain(value: Any) -> bool:
    """Whether it is a number, or lists and dicts of numbers, as a compute_loss may count in its Trainer."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return value is None or isinstance(value, (bool, int, float, str))
