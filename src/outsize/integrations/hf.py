"""outsize in transformers' Trainer: `OutsizeTrainer`, and `OutsizeMixin` for other Trainer classes (TRL's SFTTrainer).

Trainer stays the loop. The model is prepared from the first batch before the optimizer exists; the optimizer, clipping, saving and loading are the
engine's. Three places where Trainer and accelerate would put the model or the optimizer's state on the GPU are closed: moving the model at
construction, and accelerate's placement of model and optimizer when they are prepared.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from outsize.base.errors import ConfigError, DeviceOutOfMemory, EngineMisuse, tell
from outsize.base.log import log
from outsize.checkpoint.folder import newest, read_manifest, rotate
from outsize.device.choose import choose_device
from outsize.integrations.arguments import adamw, take_over
from outsize.integrations.state import load_rng, load_scheduler, rng_untouched, save_rng, save_scheduler
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.weights import Weights
from outsize.plan.pins import Pins
from outsize.plan.plan import Plan
from outsize.runtime.engine import Engine, Planned
from outsize.train.build import prepare, preview

if TYPE_CHECKING:
    _Base: Any
else:
    _Base = object


class OutsizeMixin(_Base):
    """Put it before a Trainer class: `class MyTrainer(OutsizeMixin, SFTTrainer): pass`.

    Args beside the Trainer's own, as in `outsize.prepare`:
        gpu_memory, host_memory, device, pins, plan, chunk_bytes, blocks, weights.
        sequence_len: the longest row; the plan is made for it. Default: `args.max_length` where there is one, else as long as the first batch.
        plan_batch: a batch to plan for, instead of the first one.
    """

    train_dataset: Any
    num_tokens_seen = 0
    """In training, padding included."""
    _engine: Engine | None = None

    def __init__(
        self, *args: Any, gpu_memory: str | int | None = None, host_memory: str | int | None = None, device: str | None = None,
        pins: Pins | None = None, plan: Plan | str | Path | None = None, sequence_len: int | None = None, plan_batch: dict[str, Any] | None = None,
        chunk_bytes: str | int = DEFAULT_CHUNK_BYTES, blocks: list[str] | None = None, weights: str | Path | Weights | None = None, **kwargs: Any,
    ):  # fmt: skip
        given = kwargs.get("args") or (args[1] if len(args) > 1 else None)
        if given is not None:
            take_over(given)
        self._prepare_settings: dict[str, Any] = dict(
            gpu_memory=gpu_memory, host_memory=host_memory, pins=pins, plan=plan, chunk_bytes=chunk_bytes, blocks=blocks, weights=weights
        )
        self._device_name, self._sequence_len, self._plan_batch = device, sequence_len, plan_batch
        super().__init__(*args, **kwargs)
        take_over(self.args)
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            do = "Leave optimizers and optimizer_cls_and_kwargs out; learning_rate, weight_decay, adam_* and max_grad_norm of the arguments are used"
            raise ConfigError(tell("the optimizer is the engine's", "another one was given", do))

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineMisuse(tell("the model is prepared", "neither train() nor evaluate() has begun", "Call start_engine(dataloader) first"))
        return self._engine

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine does, piece by piece."""

    # Preparing.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        take_over(self.args)
        if resume_from_checkpoint is True:
            found = newest(Path(self.args.output_dir))
            if found is None:
                do = "Start without resume_from_checkpoint, or name the folder"
                raise ConfigError(tell(f"{self.args.output_dir} has a complete checkpoint", "there is none", do))
            resume_from_checkpoint = str(found)
        elif resume_from_checkpoint:
            read_manifest(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        data = self.train_dataset
        if self._engine is None and isinstance(data, IterableDataset) and not isinstance(data, _Rewound) and not self.args.dataloader_num_workers:
            self.train_dataset = _Rewound(data)
        return super().get_train_dataloader()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._engine is None or self._engine.model is not self.model:
            self.start_engine(train_dataloader)
        placement = self.accelerator.device_placement
        self.accelerator.device_placement = False
        try:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        finally:
            self.accelerator.device_placement = placement

    def start_engine(self, dataloader: Any = None) -> Engine:
        """Plan for what the loader brings (or `plan_batch`), and prepare the model. Training and evaluation do this by themselves."""
        self._engine = prepare(self.model, **self._preparation(dataloader))
        self._prepare_settings["weights"] = None  # they are in the model now
        return self._engine

    def preview(self, dataloader: Any = None) -> Planned:
        """The plan alone."""
        return preview(self.model, **self._preparation(dataloader))

    def _preparation(self, dataloader: Any) -> dict[str, Any]:
        """The arguments of `prepare`."""
        device = choose_device(self._device_name or self.args.device.type)
        if device.torch_device.type != self.args.device.type:
            do = "Give TrainingArguments(use_cpu=True) for cpu and sim, or leave device out"
            raise ConfigError(tell(f"device is where the Trainer puts its batches ({self.args.device})", f"it is {self._device_name}", do))
        with rng_untouched(device):
            batch = self._plan_batch if self._plan_batch is not None else self._peek(dataloader)
            if self.model_accepts_loss_kwargs and "labels" in batch:
                batch = {**batch, "num_items_in_batch": self._get_num_items_in_batch([batch], torch.device("cpu"))}
        self.model.train()
        # accelerate's autocast wraps the model's forward: before the trial run, so that it is measured.
        self.accelerator.prepare_model(self.model, device_placement=False)
        names = [name for name, param in self.model.named_parameters() if param.requires_grad]
        tokens = self._sequence_len or getattr(self.args, "max_length", None)
        return dict(
            batch=batch, optimizer=adamw(self.args, self.get_decay_parameter_names(self.model), names), device=device,
            accumulate=self.args.gradient_accumulation_steps, max_shape=(self.args.per_device_train_batch_size, tokens) if tokens else None,
            loss=None if self._is_plain_loss else self._trial_loss, **self._prepare_settings,
        )  # fmt: skip

    def _peek(self, dataloader: Any) -> dict[str, Any]:
        for batch in dataloader:
            if isinstance(self.train_dataset, _Rewound):
                self.train_dataset.rewind()
            return dict(batch)
        raise ConfigError(tell("the training data has at least one batch", "it has none", "Look at the dataset, and at dataloader_drop_last"))

    @property
    def _is_plain_loss(self) -> bool:
        """The loss is the model's own: nothing outside the model allocates."""
        return type(self).compute_loss is Trainer.compute_loss and self.label_smoother is None and self.compute_loss_func is None

    def _trial_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """As in training, but what the Trainer counts beside it is not counted."""
        before = {name: deepcopy(value) for name, value in vars(self).items() if _is_plain(value)}
        inputs = dict(batch)
        num_items = inputs.pop("num_items_in_batch", None)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        try:
            return self.compute_loss(model, inputs, num_items_in_batch=num_items)
        finally:
            self.__dict__.update(before)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = self.engine.optimizer
        return self.optimizer

    # Steps.

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        ids = inputs.get("input_ids")
        self.num_tokens_seen += ids.numel() if isinstance(ids, Tensor) else 0
        with self.engine.last_backward() if self.accelerator.sync_gradients else nullcontext():
            return super().training_step(model, inputs, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.engine.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            self.start_engine(dataloader)
        try:
            with rng_untouched(self.engine.device):  # making an iterator draws a number
                return super().evaluation_loop(dataloader, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            found = f"memory ran out with {self.args.per_device_eval_batch_size} rows at once, {self.args.per_device_train_batch_size} in training"
            raise DeviceOutOfMemory(tell("evaluation fits beside the plan", found, "Lower per_device_eval_batch_size")) from error

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As Trainer's, but whole or not at all, and rotated only after that."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = Path(self._get_output_dir(trial=trial))
        place = run / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step:
            best = run / f"checkpoint-{self.state.best_global_step}"
            if best == place or best.exists():
                self.state.best_model_checkpoint = str(best)
        best_path = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        if place.exists():
            log.info("%s of an earlier run is replaced", place)
        self.engine.save(
            place, replace=True, background=self._may_save_in_background, only_model=self.args.save_only_model,
            extra=self._write_beside, then=lambda: rotate(run, self.args.save_total_limit, keep=best_path),
        )  # fmt: skip
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(place))

    @property
    def _may_save_in_background(self) -> bool:
        """Not where somebody expects the folder as soon as the save returns."""
        callbacks = self.callback_handler.callbacks
        return not self.args.push_to_hub and all(type(callback).on_save is TrainerCallback.on_save for callback in callbacks)

    def _write_beside(self, folder: Path) -> None:
        self._write_common(folder)
        if not self.args.save_only_model:
            save_rng(folder, self.engine.device)
            save_scheduler(folder, self.lr_scheduler)
        for callback in [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]:
            name, state = type(callback).__name__, callback.state()
            if isinstance(self.state.stateful_callbacks.get(name), list):
                self.state.stateful_callbacks[name].append(state)
            else:
                self.state.stateful_callbacks[name] = state
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _write_common(self, folder: Path) -> None:
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(folder)
        (folder / "training_args.json").write_text(self.args.to_json_string())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._engine is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        self.engine.export(folder)
        self._write_common(folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.finish_saving()
        return super()._finalize_training(*args, **kwargs)

    # Loading.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Trainer calls this before the model is prepared; `_load_optimizer_and_scheduler` loads everything."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.engine.load(checkpoint)
            load_scheduler(Path(checkpoint), self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_rng(Path(checkpoint), self.engine.device)

    def _load_best_model(self) -> None:
        self.engine.load(self.state.best_model_checkpoint, only_model=True)


class OutsizeTrainer(OutsizeMixin, Trainer):
    """transformers' Trainer under a memory budget: `OutsizeTrainer(model=..., args=..., train_dataset=..., gpu_memory="24GiB")`."""


class _Rewound(IterableDataset):
    """A stream whose first items were looked at and are given again; its later passes are its own."""

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset
        self._seen: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._looking = True

    def rewind(self) -> None:
        self._looking = False

    def __iter__(self) -> Iterator[Any]:
        if self._rest is not None and not self._looking:
            seen, rest, self._seen, self._rest = self._seen, self._rest, [], None
            return itertools.chain(seen, rest)
        if not self._looking:
            return iter(self.dataset)
        self._rest = iter(self.dataset)
        return self._look()

    def _look(self) -> Iterator[Any]:
        for item in self._rest or ():
            self._seen.append(item)
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataset"], name)


def _is_plain(value: Any) -> bool:
    """Counters and lists of numbers: what a compute_loss may leave behind in its Trainer."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
