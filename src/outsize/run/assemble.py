"""Builds a ready Trainer from a RunConfig: tokenizer, data, model, adapter, arguments."""

import os
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PrinterCallback, TrainingArguments, set_seed

from outsize.base.errors import ConfigError, OutsizeError
from outsize.base.log import log
from outsize.checkpoint.folder import checkpoints, read_manifest
from outsize.config.run import RunConfig
from outsize.data.packing import keeps_documents_apart
from outsize.device.choose import choose_device
from outsize.device.sdp_kernel import use_sdp_kernel
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.build import Built, build_model, load_config, require_positions
from outsize.model.offloading import pins_of_offloading
from outsize.model.packed_attention import VARLEN
from outsize.optim.names import OPTIMIZERS, spec_class
from outsize.quant.installed import bitsandbytes
from outsize.run.adapters import adapt, materialize, method_of
from outsize.run.compat_checks import (
    first_line,
    make_trackers,
    require_language_model,
    require_packable,
    require_scheduler,
    require_sdpa,
    require_vocabulary,
    with_installed_attention,
    with_packed_attention,
)
from outsize.run.cpu_threads import set_threads
from outsize.run.disk import disk_need, num_steps, require_disk_space
from outsize.run.distill import distill_trainer
from outsize.run.distill_batches import DistillBatches
from outsize.run.dpo import dpo_arguments, dpo_trainer, widest_pairs
from outsize.run.inputs import load_inputs
from outsize.run.model_card import adapter_card
from outsize.run.plan_batch import batches_to_plan_for, collator_of
from outsize.run.resume_fingerprint import (
    base_record,
    newest_of_run,
    require_resumable,
    require_same_data,
    resume_fingerprint,
    split_of,
    threads_in,
)
from outsize.run.row_lengths import longest_row, tokens_per_row
from outsize.run.trained import freeze
from outsize.run.trainer import RunTrainer
from outsize.run.vision import load_vision
from outsize.schedule.pins import Pins
from outsize.setup.micro_batch import Split, splits_of

_SAME_NAMES = (
    "output_dir", "learning_rate", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "max_grad_norm", "save_total_limit", "save_only_model", "eval_steps", "load_best_model_at_end",
    "metric_for_best_model", "logging_steps", "seed", "data_seed", "dataloader_num_workers", "full_determinism",
    "train_sampling_strategy", "run_name",
)  # fmt: skip
"""Settings that TrainingArguments has under the same name, with the same meaning."""
_NEVER = 2**31
"""Steps between saves if only the end is saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    trainer: Any
    """A RunTrainer; with `rl: dpo` one of run/dpo.py, with `teacher_model` one of run/distill.py."""
    tokenizer: Any
    checkpoint: Path | None
    """To resume from."""
    num_rows: int
    """Pairs, with `rl: dpo`."""
    num_eval_rows: int
    steps: int
    """Optimizer steps of the whole run."""
    longest_row: int
    """Tokens of the longest row after padding to `sequence_len` or packing. The plan is for such rows."""
    tokens_per_row: float
    """Of the average training row, without padding."""
    chosen_by: str
    """How the micro-batch was chosen, if it was."""
    threads_text: str
    """For the user, if the number of CPU threads was chosen."""


def assemble(config: RunConfig, batches: DistillBatches | None = None) -> Assembled:
    """All checks that are possible before the first step happen here, the cheapest first.

    `batches`: of a distillation after pruning, whose config has one split of the batch.
    """
    if config.prune is not None:
        raise ConfigError("prune: is for `outsize prune`, which trains layer by layer. Run that, or remove prune.")
    device = choose_device(config.device)
    config = with_packed_attention(with_installed_attention(config), device)
    require_sdpa(config)
    use_sdp_kernel(config.sdp_kernel, device)
    checkpoint = find_checkpoint(config)
    splits = _splits(config)
    changed: list[str] = []
    if checkpoint is not None:
        splits = [split_of(checkpoint, splits)]
        changed = require_resumable(checkpoint, _split(config, splits[0]))
    else:
        _check_earlier_run(config)
    _require_writable(Path(config.output_dir))
    config = _split(config, splits[0])
    arguments = training_arguments(config, on_gpu=device.is_gpu)
    os.environ.update(config.environment)
    trackers, arguments.report_to = make_trackers(arguments.report_to), []
    require_scheduler(config)
    # A wrong name is reported as such, not as a missing tokenizer.
    load_config(config.base_model, for_adapter=config.adapter == "lora")
    if config.quantization is not None:
        bitsandbytes()
    vision = load_vision(config)
    inputs = load_inputs(config, vision)
    tokenizer, pad_id, train, evaluated = inputs.tokenizer, inputs.pad_id, inputs.train, inputs.evaluated
    if checkpoint is not None:
        require_same_data(checkpoint, config, inputs.fingerprints)
    base = base_record(config, checkpoint)
    set_seed(config.seed)
    built = _build(config, checkpoint)
    require_language_model(built.model)
    require_positions(built.model.config, config.sequence_len)
    if config.sample_packing:
        require_packable(built.model)
    require_vocabulary(built.model, tokenizer, inputs.parts, pad_id)
    freeze(built.model, config)
    parts = inputs.parts
    tokens = longest_row(config, parts)
    stored_threads = threads_in(checkpoint) if checkpoint is not None else None
    threads_text = set_threads(built.model, splits[0].rows * tokens, device, stored_threads)
    if config.adapter == "lora":
        built = adapt(built, config)
    vocabulary: int = built.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    patience = config.early_stopping_patience
    collator = collator_of(config, pad_id, config.sequence_len, vision, parts)
    batch_of = batches_to_plan_for(config, collator, parts, tokens, vocabulary)
    if batches is not None:
        batches = batches.of(train, is_on_gpu=device.is_gpu)
        batch_of = batches.batch_to_plan_for(batch_of)
    if config.rl is not None:
        batch_of = partial(widest_pairs, collator, tokens, vocabulary)
    common: dict[str, Any] = dict(
        model=built.model,
        args=arguments,
        processing_class=tokenizer if vision is None else vision.processor,
        callbacks=[*trackers, *([EarlyStoppingCallback(patience)] if patience else [])],
        gpu_memory=config.gpu_memory,
        host_memory=config.host_memory,
        device=config.device,
        plan=config.plan_file,
        pins=pins_of(config),
        chunk_bytes=config.chunk_bytes or DEFAULT_CHUNK_BYTES,
        weights=built.weights,
        nonfinite=config.nonfinite,
        chunked_loss=_chunked_loss(config, checkpoint),
        tile_tokens=config.tile_tokens,
        method=method_of(config),
        plan_batch=batch_of(splits[0].rows),
    )
    trainer: Any
    rows: dict[str, Any] = dict(train_dataset=train, eval_dataset=evaluated, data_collator=collator)
    if batches is not None:
        rows |= dict(train_dataset=batches.rows(train), data_collator=batches.collator(collator))
    if config.teacher_model is not None:
        trainer = distill_trainer(config, batches, **rows, **common)
    elif config.rl is None:
        trainer = RunTrainer(**rows, **common)
    else:
        reference = None if config.adapter == "lora" else materialize(_build(config, None))
        trainer = dpo_trainer(config, train, evaluated, reference, **common)
    trainer.remove_callback(PrinterCallback)
    chosen_by = ""
    if len(splits) > 1:
        choice = trainer.choose_split(splits, batch_of)
        config, chosen_by = _split(config, choice.split), choice.words
        arguments.per_device_eval_batch_size = config.eval_batch_size or choice.split.rows
        log.info(chosen_by)
    layout = spec_class(config.optimizer)().rule.layout
    rows_per_item = 1 if config.rl is None else 2
    steps = num_steps(config, len(train) // rows_per_item)
    _warn_of_few_rows(config, arguments, len(train) // rows_per_item, steps)
    require_disk_space(disk_need(built.model, arguments, layout, checkpoint, steps), arguments)
    threads = None if device.is_gpu else torch.get_num_threads()
    if config.adapter == "lora":
        adapted: Any = built.model
        found = {name: getattr(adapted.peft_config["default"], name) for name in ("r", "lora_alpha", "lora_dropout")}
        trainer.card = adapter_card(config, found, type(adapted.get_base_model()).__name__, trainer.processing_class)
    trainer.prompts, trainer.changed = tuple(inputs.prompts), tuple(changed)
    trainer.fingerprint = resume_fingerprint(config, inputs.fingerprints, threads, checkpoint, base)
    return Assembled(
        trainer=trainer,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        num_rows=len(train) // rows_per_item,
        num_eval_rows=len(evaluated) // rows_per_item if evaluated is not None else 0,
        steps=steps,
        longest_row=tokens,
        tokens_per_row=tokens_per_row(train),
        chosen_by=chosen_by,
        threads_text=threads_text,
    )


def _warn_of_few_rows(config: RunConfig, arguments: TrainingArguments, num_rows: int, steps: int) -> None:
    """Small data with settings for large data train almost nothing."""
    assert config.micro_batch_size is not None and config.gradient_accumulation_steps is not None
    rows_per_step = config.micro_batch_size * config.gradient_accumulation_steps
    if rows_per_step > num_rows:
        log.warning(
            "gradient_accumulation_steps: a step has %d rows (micro_batch_size × gradient_accumulation_steps), but the "
            "data has %d%s. Lower one of them.",
            rows_per_step, num_rows, " packed" if config.sample_packing else "",
        )  # fmt: skip
    if (warmup := arguments.get_warmup_steps(steps)) >= steps:
        log.warning(
            "warmup_steps: %d, but the run has %d steps: the learning rate does not reach learning_rate. Lower it, or "
            "raise num_epochs.",
            warmup, steps,
        )  # fmt: skip


def _chunked_loss(config: RunConfig, checkpoint: Path | None) -> bool | None:
    """A resumed run computes its loss as before, also if other evaluation data change the size of the planned batch."""
    splits = {"batch_size", "micro_batch_size", "gradient_accumulation_steps"}
    if config.chunked_loss is not None or checkpoint is None or not splits.isdisjoint(config.overridden):
        return config.chunked_loss
    chunk = read_manifest(checkpoint).get("loss_chunk")
    return None if chunk is None else chunk > 0


def _splits(config: RunConfig) -> list[Split]:
    return splits_of(
        config.batch_size,
        config.micro_batch_size,
        config.gradient_accumulation_steps,
        name="gradient_accumulation_steps",
    )


def _split(config: RunConfig, split: Split) -> RunConfig:
    return replace(config, micro_batch_size=split.rows, gradient_accumulation_steps=split.passes)


def _build(config: RunConfig, checkpoint: Path | None) -> Built:
    whole = checkpoint is not None and config.adapter is None  # OSFT needs the weights that the run began with
    try:
        return build_model(
            config.base_model,
            dtype=torch.bfloat16 if config.bf16 else torch.float32,
            random=config.reinit_weights and not whole,
            weights_from=str(checkpoint) if whole else None,
            attn_implementation=config.attn_implementation,
            overrides=config.overrides_of_model_config,
            rope_parameters=config.rope_parameters,
            for_adapter=config.adapter == "lora",
            quantization=config.quantization,
        )
    except OutsizeError:
        raise
    except (ImportError, ValueError) as error:
        if config.attn_implementation is None:
            raise
        raise ConfigError(
            f"attn_implementation: {config.attn_implementation} cannot be used ({first_line(error)}). Remove it, or "
            "install what it needs."
        ) from None


def start(assembled: Assembled, config: RunConfig) -> None:
    """Prepare the model. With packing, test that the documents of a row are independent."""
    trainer = assembled.trainer
    trainer.start_engine()
    vocabulary = trainer.model.config.get_text_config().vocab_size
    if config.sample_packing and not keeps_documents_apart(
        trainer.model,
        vocabulary,
        rows=trainer.args.per_device_train_batch_size,
        takes_boundaries=trainer.model.config.get_text_config()._attn_implementation == VARLEN,
    ):
        raise ConfigError(
            f"sample_packing: in {type(trainer.model).__name__} the documents of a packed row attend to each other. "
            "Use sample_packing: false, or another attn_implementation."
        )


def find_checkpoint(config: RunConfig) -> Path | None:
    wanted = config.resume_from_checkpoint
    if isinstance(wanted, str):
        if not Path(wanted).is_dir():
            raise ConfigError(
                f"resume_from_checkpoint: there is no folder {wanted}. Correct it; true means the newest in output_dir."
            )
        read_manifest(Path(wanted))
        return Path(wanted)
    if not wanted and not config.auto_resume_from_checkpoints:
        return None
    found, earlier = newest_of_run(Path(config.output_dir))
    if found is None and wanted:
        advice = "Start without --resume, or name the folder: --set resume_from_checkpoint=FOLDER."
        if earlier is not None:
            advice = (
                f"{earlier} is of an earlier run; --set resume_from_checkpoint={earlier} in place of --resume "
                "continues it."
            )
        raise ConfigError(
            f"resume_from_checkpoint: there is no complete checkpoint in {config.output_dir}"
            f"{' of the last run' if earlier is not None else ''}. {advice}"
        )
    if earlier is not None:
        log.warning("%s is of an earlier run in this folder and is not used", earlier)
    return found


def training_arguments(config: RunConfig, *, on_gpu: bool) -> TrainingArguments:
    split = _splits(config)[0]
    save_steps = config.save_steps or (config.eval_steps if config.load_best_model_at_end else None) or _NEVER
    save_strategy = (
        config.evaluates if config.load_best_model_at_end and config.save_steps is None else config.save_strategy
    )
    kind = TrainingArguments if config.rl is None else partial(dpo_arguments, config)
    return kind(
        **{name: getattr(config, name) for name in _SAME_NAMES},
        per_device_train_batch_size=split.rows,
        per_device_eval_batch_size=config.eval_batch_size or split.rows,
        gradient_accumulation_steps=split.passes,
        num_train_epochs=config.num_epochs,
        max_steps=config.max_steps or -1,
        lr_scheduler_type=config.lr_scheduler,
        lr_scheduler_kwargs=config.lr_scheduler_kwargs or {},
        warmup_steps=config.warmup_steps or config.warmup_ratio or 0,
        optim=(OPTIMIZERS[config.optimizer][1] or (config.optimizer,))[0],
        save_strategy=save_strategy,
        save_steps=save_steps,
        eval_strategy=config.evaluates,
        report_to=list(config.report_to),
        project=config.environment.get("TRACKIO_PROJECT_NAME", "huggingface"),  # of trackio; transformers' default
        use_cpu=not on_gpu,
        remove_unused_columns=False,
        disable_tqdm=True,
        bf16=False,
        tf32=config.tf32 if on_gpu else None,
        dataloader_pin_memory=on_gpu,
        # The filter syncs the host after every micro-batch, and it hides a NaN.
        logging_nan_inf_filter=False,
    )


def pins_of(config: RunConfig) -> Pins | None:
    name, is_frozen = config.activation_offloading, config.adapter == "lora"
    if name == "hidden_states" and is_frozen:
        log.warning(
            "activation_offloading: hidden_states recomputes every layer, and the base is frozen. With true, what "
            "layers save is copied instead, without recomputing."
        )
    if name == "legacy":
        log.warning(
            "activation_offloading: legacy offloads all that layers save. In a plan its copies run beside compute; the "
            "bits are the same."
        )
    given: dict[str, Any] = {**pins_of_offloading(name, is_frozen=is_frozen), **(config.pins or {})}
    return Pins(**given) if given else None


def _check_earlier_run(config: RunConfig) -> None:
    """Checkpoints are ordered by step number alone: with a limit, those of this run would be deleted before those of a
    longer earlier run.
    """
    found = checkpoints(Path(config.output_dir))
    if not found:
        return
    last = found[-1][1]
    if config.save_total_limit is not None:
        raise ConfigError(
            f"save_total_limit: {last} is from an earlier run. Resume from it with --resume, set another "
            "output_dir, or remove the checkpoints."
        )
    log.warning(
        "output_dir: %s is of an earlier run. This run starts from the beginning; its checkpoints replace those of the "
        "same steps. To continue the earlier run, stop and add --resume.",
        last,
    )


def _require_writable(folder: Path) -> None:
    probe = folder / f".outsize-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        os.unlink(probe)
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be written ({error.strerror}). Set another one.") from None
