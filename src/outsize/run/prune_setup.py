"""What a pruning run needs before anything is measured or trained: checks, inputs, teacher, variants, spec."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler

from outsize.base.errors import ConfigError
from outsize.config.prune import PruneConfig
from outsize.config.run import RunConfig
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.methods.bypass.layouts import inspect_layer
from outsize.methods.bypass.losses import LOSSES, Loss
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.variants import Requested, Variant, requested_variants, resolve, whole_variants
from outsize.model.build import build_model, local_folder, require_positions
from outsize.model.stack import LayerStack
from outsize.optim.adamw import AdamW
from outsize.optim.flat import scratch_bytes
from outsize.run.compat_checks import (
    require_language_model,
    require_packable,
    require_scheduler,
    require_vocabulary,
    with_installed_attention,
    with_packed_attention,
)
from outsize.run.content_hash import model_hash, rows_hash
from outsize.run.inputs import BatchOrder, data_seed, load_inputs, token_lengths
from outsize.run.model_code import model_code
from outsize.run.plan_batch import batches_to_plan_for, collator_of
from outsize.run.prune_batches import BatchSource
from outsize.run.prune_reduced import Reduced, make_reduced
from outsize.run.prune_spec import PruneSpec, prune_spec, require_same
from outsize.run.row_lengths import longest_row
from outsize.run.teacher import Teacher
from outsize.setup.micro_batch import splits_of
from outsize.setup.planner import requested_gpu_bytes
from outsize.transfer.batch_cache import BatchSpec

_FEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneSetup:
    config: RunConfig
    """With its micro-batch."""
    prune: PruneConfig
    device: Device
    gpu_bytes: int
    """`gpu_memory`, or what is free."""
    spec: PruneSpec
    earlier: PruneSpec | None
    """Of an earlier run in the folder."""
    teacher: Teacher
    stack: LayerStack
    train: BatchSource
    num_batches: int
    validation: BatchSource | None
    num_validation: int
    num_calibration: int
    """Batches that importance is measured on: the first ones."""
    widest: dict[str, Any]
    """The arguments of the batch that needs the most memory, on the host."""
    has_padding: bool
    """Some rows are shorter than others of their batch."""
    hidden: BatchSpec
    """Of the widest batch."""
    parts: dict[int, LayerParts]
    """Of the layers that have variants. Of the teacher, whatever their hidden size is."""
    variants: dict[int, tuple[Variant, ...]]
    optimizer: AdamW
    loss: Loss
    lr_of: Callable[[int], float]
    reduced: Reduced | None = None
    """With `hidden_size`: the model that variants belong to. None: they belong to the teacher."""
    unreduced: "PruneSetup | None" = None
    """If `teacher`, `stack` and `parts` are those of the reduced model (`of_reduced`): the setup with the teacher's."""

    def of_reduced(self) -> "PruneSetup":
        """The setup with the reduced model, whose channels are known, in place of the teacher."""
        if self.reduced is None:
            return self
        teacher, stack = self.reduced.teacher, self.reduced.stack
        with self.device.on_host(), teacher.finding_stem():
            stack.capture({name: _put(self.device, value) for name, value in self.widest.items()})
        return replace(self, teacher=teacher, stack=stack, parts=self.reduced.parts, unreduced=self)

    def whole(self, layer: int) -> tuple[Variant, ...]:
        """Variants of a layer that prune nothing of what is trained."""
        return whole_variants(self.prune.learn, self.parts[layer].shape)

    @contextmanager
    def parts_with_weights(self, layer: int) -> Iterator[LayerParts]:
        """What the variants of a layer are made from, with weights in host memory. The teacher's layer has its weights
        there.
        """
        if self.reduced is None or self.unreduced is not None:
            yield self.parts[layer]
        else:
            with self.reduced.layer(layer) as parts:
                yield parts

    @property
    def num_layers(self) -> int:
        """Layers that the teacher runs: up to the last that has variants."""
        return max(self.variants) + 1

    @property
    def fixed_bytes(self) -> int:
        """On the device for the whole run: stem, buffers, workspace of the optimizer, numbers of channels."""
        others = 0 if self.reduced is None else self.reduced.resident_bytes
        return self.teacher.resident_bytes + others + scratch_bytes(self.optimizer)

    @property
    def num_steps(self) -> int:
        return self.spec.steps

    def hidden_at(self, source: BatchSource, k: int) -> BatchSpec:
        return BatchSpec((*source.shape(k), *self.hidden.shape[2:]), self.hidden.dtype)


def set_up(config: RunConfig) -> PruneSetup:
    """All checks that are possible before the first computation, the cheapest first."""
    prune = config.prune
    if prune is None:
        raise ConfigError("prune: missing. Name the variants under prune, for example intermediate_size: [0.75, 0.5].")
    device = choose_device(config.device)
    gpu_bytes = requested_gpu_bytes(config.gpu_memory, device)
    requested = requested_variants(
        intermediate_size=prune.intermediate_size,
        num_key_value_heads=prune.num_key_value_heads,
        kv_heads=prune.kv_heads,
        experts=prune.experts,
        skip=prune.skip,
        linear=prune.linear,
        copy=prune.copy,
    )
    require_scheduler(config)
    _require_known_code(config.base_model, prune)
    config = with_packed_attention(with_installed_attention(config), device)
    split = splits_of(
        config.batch_size,
        config.micro_batch_size,
        config.gradient_accumulation_steps,
        name="gradient_accumulation_steps",
    )[0]
    config = replace(config, micro_batch_size=split.rows, gradient_accumulation_steps=split.passes)
    inputs = load_inputs(config)
    order = BatchOrder(
        num_rows=len(inputs.train),
        rows_per_batch=split.rows,
        seed=data_seed(config),
        is_sequential=config.train_sampling_strategy == "sequential",
    )
    lengths = token_lengths(inputs.train)
    _require_a_step(prune, order, lengths, split.passes)
    num_batches = order.num_batches(lengths, prune.tokens, multiple=split.passes)
    spec = prune_spec(
        config,
        teacher=model_hash(local_folder(config.base_model)),
        data=rows_hash(inputs.train),
        validation_data=None if inputs.evaluated is None else rows_hash(inputs.evaluated),
        order=order,
        num_batches=num_batches,
    )
    earlier = require_same(Path(config.output_dir), spec)
    built = build_model(
        config.base_model,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        attn_implementation=config.attn_implementation,
        overrides=config.overrides_of_model_config,
        rope_parameters=config.rope_parameters,
        trust_remote_code=prune.trust_remote_code,
    )
    require_language_model(built.model)
    require_positions(built.model.config, config.sequence_len)
    if config.sample_packing:
        require_packable(built.model)
    require_vocabulary(built.model, inputs.tokenizer, inputs.parts, inputs.pad_id)
    vocabulary: int = built.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    teacher = Teacher(built, device)
    stack = LayerStack(built.model, prune.blocks, materialized=teacher.materialized)
    longest = longest_row(config, inputs.parts)
    collator = collator_of(config, inputs.pad_id, longest, None, inputs.parts)
    widest = batches_to_plan_for(config, collator, inputs.parts, longest, vocabulary)(split.rows)
    widest.pop("labels", None)
    with device.on_host():
        with teacher.finding_stem():
            calls = stack.capture({name: _put(device, value) for name, value in widest.items()})
        small = stack.capture({name: _put(device, value) for name, value in _first_row(widest).items()})
        parts, variants = _variants(prune, requested, stack, teacher, small)
        reduced = None
        if prune.hidden_size is not None:
            few = {name: _put(device, value) for name, value in _first_row(widest).items()}
            reduced = make_reduced(teacher, stack, parts, prune.hidden_size, few, device)
    width = config.sequence_len if config.sample_packing else longest if config.pad_to_sequence_len else None
    validation, num_validation = None, 0
    if inputs.evaluated is not None:
        held_out = replace(order, num_rows=len(inputs.evaluated), is_sequential=True)
        validation = BatchSource(inputs.evaluated, held_out, collator, width=width)
        num_validation = max(1, len(inputs.evaluated) // split.rows)
    train = BatchSource(inputs.train, order, collator, width=width)
    calibration = 0
    if prune.importance != "truncate":
        calibration = min(num_batches, order.num_batches(lengths, prune.importance_tokens))
    names = dict.fromkeys(variant.name for layer in sorted(variants) for variant in variants[layer])
    return PruneSetup(
        config=config,
        prune=prune,
        device=device,
        gpu_bytes=gpu_bytes,
        spec=replace(spec, variants=tuple(names)),
        earlier=earlier,
        teacher=teacher,
        stack=stack,
        train=train,
        num_batches=num_batches,
        validation=validation,
        num_validation=num_validation,
        num_calibration=calibration,
        widest=widest,
        has_padding=any(bool((token_lengths(part) != longest).any()) for part in inputs.parts),
        hidden=BatchSpec(tuple(calls.hidden.shape), calls.hidden.dtype),
        parts=parts,
        variants=variants,
        optimizer=_optimizer(config),
        loss=LOSSES[prune.loss],
        lr_of=learning_rates(config, spec.steps),
        reduced=reduced,
    )


def _first_row(arguments: dict[str, Any]) -> dict[str, Any]:
    """The beginning of the first row, if the arguments are per token alone: enough to look into a layer."""
    shape = arguments["input_ids"].shape
    if any(getattr(value, "shape", None) != shape for value in arguments.values()):
        return arguments
    return {name: value[:1, :_FEW_TOKENS] for name, value in arguments.items()}


def _put(device: Device, value: Any) -> Any:
    return device.put(value) if isinstance(value, torch.Tensor) else value


def _require_known_code(model: str, prune: PruneConfig) -> None:
    """Code of a model's folder runs only if the user allows it."""
    path = Path(model)
    path = path if path.name == "config.json" else path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported when the model is built, or a hub id
        return
    if "auto_map" not in config:
        return
    if not prune.trust_remote_code:
        raise ConfigError(
            f"base_model: {model} has model code of its own (auto_map in config.json), which is not run unless you "
            "allow it. If you trust its author, set prune.trust_remote_code: true."
        )
    if model_code(path.parent).model_module is not None and prune.distill is not None:
        raise ConfigError(
            f"prune.distill: {model} has model code of its own, and outsize train does not run the code of a folder. "
            "Remove distill."
        )


def _require_a_step(prune: PruneConfig, order: BatchOrder, lengths: Any, passes: int) -> None:
    rows = order.rows_per_batch * passes
    if order.num_rows < rows:
        raise ConfigError(
            f"datasets: {order.num_rows} rows are fewer than the {rows} of one step (micro_batch_size × "
            "gradient_accumulation_steps). Add data, or lower one of them."
        )
    tokens = sum(int(lengths[order.rows(k)].sum()) for k in range(passes))
    if prune.tokens < tokens:
        raise ConfigError(
            f"prune.tokens: {prune.tokens} tokens are fewer than the {tokens} of one step. Raise it, or lower "
            "micro_batch_size or gradient_accumulation_steps."
        )


def _variants(
    prune: PruneConfig, requested: tuple[Requested, ...], stack: LayerStack, teacher: Teacher, calls: Any
) -> tuple[dict[int, LayerParts], dict[int, tuple[Variant, ...]]]:
    """Of the layers that are pruned, if they have any. Layers of equal structure have the same sub-blocks."""
    if too_large := [layer for layer in prune.only_layers if layer >= len(stack.layers)]:
        raise ConfigError(
            f"prune.only_layers: there is no layer {too_large[0]}; the teacher has layers 0 to {len(stack.layers) - 1}."
        )
    overrides = {str(role): path for role, path in (prune.subblocks or {}).items()}
    known: dict[str, LayerParts] = {}
    parts: dict[int, LayerParts] = {}
    variants: dict[int, tuple[Variant, ...]] = {}
    pruned = set(prune.only_layers) or set(range(len(stack.layers)))
    for index in range(len(stack.layers)) if prune.hidden_size is not None else sorted(pruned):
        layer = stack.layers[index]
        if layer.structure not in known:
            with teacher.materialized(list(layer.module.parameters())):
                known[layer.structure] = inspect_layer(
                    layer.name, layer.module, stack.config, calls.calls[index], calls.hidden, overrides
                )
        found = known[layer.structure].of_layer(layer.name, layer.module)
        made = resolve(requested, prune.learn, found.shape, layer.name) if index in pruned else ()
        if prune.hidden_size is not None:
            if not (whole := whole_variants(prune.learn, found.shape)):
                raise ConfigError(
                    f"prune.hidden_size: no part of {layer.name} is trained for it. Name its modules with "
                    "prune.subblocks, set prune.learn: block, or remove hidden_size."
                )
            made = tuple(dict.fromkeys((*made, *whole)))
        if made:
            parts[index], variants[index] = found, made
    kinds = {change.kind for made in variants.values() for variant in made for change in variant.changes}
    if missing := sorted({request.kind for request in requested} - kinds):
        raise ConfigError(
            f"prune.{missing[0]}: no layer that is pruned has a part that it applies to. Remove it, name the modules "
            "with prune.subblocks, or change prune.learn."
        )
    return parts, variants


def _optimizer(config: RunConfig) -> AdamW:
    return AdamW(
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm or None,
        nonfinite=config.nonfinite,
    )


def learning_rates(config: RunConfig, steps: int) -> Callable[[int], float]:
    """The learning rate of each step, counted from 0: the run's schedule over the whole budget."""
    warmup = config.warmup_steps or config.warmup_ratio or 0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    scheduler: Any = get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(warmup * steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )
    if not hasattr(scheduler, "lr_lambdas"):
        raise ConfigError(f"lr_scheduler: {config.lr_scheduler} depends on the loss. Use another one.")
    shape = scheduler.lr_lambdas[0]
    return lambda step: config.learning_rate * float(shape(step))
