"""Pruning runs for tests, and the plain loop that they must equal to the bit: step by step over the whole model, with
hooks of its own and `outsize.reference.AdamW`.
"""

import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folders
import numpy as np
import torch
import yaml
import zoo
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from outsize.base.errors import PlanInfeasible
from outsize.config.read import read_config
from outsize.config.run import RunConfig
from outsize.methods.bypass.builder import build_student
from outsize.methods.bypass.losses import LOSSES
from outsize.methods.bypass.subblocks import SubBlockRun
from outsize.model.stack import LayerCall
from outsize.reference import AdamW
from outsize.run.prune import PruneOutcome, prune_run
from outsize.run.prune_library import BEST, LATEST, STATE, Library
from outsize.run.prune_setup import PruneSetup, set_up

ROWS, PASSES = 2, 2
VARIANTS = {
    "intermediate_size": [24], "num_key_value_heads": [1], "skip": ["attention"], "linear": True, "copy": ["ffn"],
}  # fmt: skip


def write(folder: Path, kind: str = "llama", *, prune: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A teacher, data and run.yaml below `folder`; returns the YAML. Five steps of two batches of two rows."""
    model = folder / "model"
    if not model.exists():
        if kind == "gemma3":
            gemma3().save_pretrained(model)
        else:
            folders.write_model(model, kind)
        folders.write_tokenizer(model)
    data = folders.write_text(folder / "data.jsonl", 14)
    settings = {
        "base_model": str(model),
        "datasets": [str(data)],
        "sequence_len": 24,
        "micro_batch_size": ROWS,
        "gradient_accumulation_steps": PASSES,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "output_dir": str(folder / "out"),
        "device": "cpu",
    }
    path = folder / "run.yaml"
    chosen = {"tokens": 450, "importance": "truncate", "keep_optimizer": True, **VARIANTS, **(prune or {})}
    path.write_text(yaml.safe_dump({**settings, **keys, "prune": chosen}, sort_keys=False))
    return path


def gemma3() -> nn.Module:
    """With layers of two kinds of masks."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=6, max_position_embeddings=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], query_pre_attn_scalar=8,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).to(torch.bfloat16)


def run(yaml: Path, *overrides: str, dry_run: bool = False) -> PruneOutcome:
    return prune_run(read_config(yaml, overrides), Console(file=io.StringIO()), dry_run=dry_run)


def least_gpu_memory(yaml: Path, *overrides: str) -> int:
    """What a run that does not fit says is enough."""
    try:
        run(yaml, *overrides, dry_run=True)
    except PlanInfeasible as error:
        assert error.resource == "gpu"
        return error.needed_bytes
    raise AssertionError("it fits")


@dataclass(frozen=True)
class Result:
    """One variant, as the library has it or as a plain loop made it."""

    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    losses: tuple[tuple[int, float], ...]


Results = dict[tuple[int, str], Result]


def library(folder: Path) -> Results:
    found, stored = {}, Library(folder)
    for path in sorted((folder / "library").glob("*/*")):
        entry = stored.entry(int(path.parent.name), path.name)
        assert entry is not None
        weights = entry.tensors(LATEST) if entry.has(LATEST) else entry.tensors(BEST) if entry.has(BEST) else {}
        state = entry.tensors(STATE) if entry.has(STATE) else {}
        found[int(path.parent.name), path.name] = Result(weights, state, entry.description.losses)
    return found


def require_equal(left: Results, right: Results) -> None:
    assert left.keys() == right.keys()
    for key, one in left.items():
        other = right[key]
        assert one.losses == other.losses, key
        for mine, theirs in ((one.weights, other.weights), (one.state, other.state)):
            assert mine.keys() == theirs.keys(), key
            for name, tensor in mine.items():
                assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), (key, name)


def plain(yaml: Path) -> Results:
    """Step by step, all layers per batch."""
    config = read_config(yaml)
    setup = set_up(config)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(config.base_model, dtype=dtype).eval().requires_grad_(False)
    students, optimizers, losses = {}, {}, {}
    for layer, variants in setup.variants.items():
        name = setup.stack.layers[layer].name
        parts = setup.parts[layer].of_layer(name, model.get_submodule(name))
        for variant in variants:
            key = (layer, variant.name)
            students[key], losses[key] = build_student(parts, variant), list[tuple[int, float]]()
            if variant.is_trained:
                optimizers[key] = AdamW(
                    [param for param in students[key].parameters() if param.requires_grad],
                    betas=(config.adam_beta1, config.adam_beta2), weight_decay=config.weight_decay,
                    max_grad_norm=config.max_grad_norm or None,
                )  # fmt: skip
    loss_of = LOSSES[setup.prune.loss]
    for step in range(setup.num_steps):
        values: dict[Any, list[float]] = {key: [] for key in optimizers}
        for k in range(step * config.gradient_accumulation_steps, (step + 1) * config.gradient_accumulation_steps):
            arguments, valid = batch(setup, config, k)
            seen = recorded(setup, model, arguments)
            for layer, variants in setup.variants.items():
                for variant in variants:
                    key = (layer, variant.name)
                    if key in optimizers:
                        given = seen[layer, variant.learn]
                        value = loss_of(students[key](given), given.target, valid)
                        (value / config.gradient_accumulation_steps).backward()
                        values[key].append(value.item())
        for key, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = setup.lr_of(step)
            optimizer.step()
            optimizer.zero_grad()
            losses[key].append((step + 1, sum(values[key]) / len(values[key])))
    return {
        key: Result(
            {name: tensor.detach() for name, tensor in student.layer_tensors().items()},
            state_of(student, optimizers[key]) if key in optimizers else {},
            tuple(losses[key]),
        )
        for key, student in students.items()
    }


def batch(setup: PruneSetup, config: RunConfig, k: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Batch k by the documented order: a permutation of the rows per epoch, padded to the longest row."""
    rows = setup.train._rows
    count, seed = len(rows), config.seed
    places = [divmod(place, count) for place in range(k * config.micro_batch_size, (k + 1) * config.micro_batch_size)]
    chosen = [rows[int(np.random.default_rng([seed, epoch]).permutation(count)[at])] for epoch, at in places]
    width = max(len(row["input_ids"]) for row in chosen)
    ids = torch.full((len(chosen), width), 1)
    mask = torch.zeros((len(chosen), width), dtype=torch.int64)
    for i, row in enumerate(chosen):
        length = len(row["input_ids"])
        ids[i, :length], mask[i, :length] = torch.from_numpy(row["input_ids"].astype(np.int64)), 1
    return {"input_ids": ids, "attention_mask": mask}, None if bool(mask.all()) else mask.bool()


@torch.no_grad()
def recorded(setup: PruneSetup, model: nn.Module, arguments: dict[str, Tensor]) -> dict[Any, SubBlockRun]:
    """What the teacher's forward gives each sub-block, and what it returns."""
    inputs: dict[Any, Tensor] = {}
    calls: dict[Any, LayerCall] = {}
    found: dict[Any, SubBlockRun] = {}
    handles = []

    def watch(key: Any, module: nn.Module, norm: nn.Module | None, *, is_layer: bool) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            at: int | str = 0 if args else "hidden_states"
            hidden = args[0] if args else kwargs["hidden_states"]
            calls[key] = LayerCall.of(args, kwargs, at)
            if norm is None:
                inputs[key] = hidden.clone()

        def after(_: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            target = output.float() - inputs[key].float() if is_layer else output.clone()
            found[key] = SubBlockRun(inputs[key], calls[key], target.reshape(inputs[key].shape))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
        if norm is not None:
            handles.append(norm.register_forward_pre_hook(lambda _, args: inputs.__setitem__(key, args[0].clone())))

    for layer, parts in setup.parts.items():
        module = model.get_submodule(setup.stack.layers[layer].name)
        watch((layer, "block"), module, None, is_layer=True)
        for kind, part in parts.subblocks.items():
            norm = module.get_submodule(part.norm) if part.norm is not None else None
            watch((layer, kind), module.get_submodule(part.module), norm, is_layer=False)
    model(**arguments, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def state_of(student: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, param in student.named_parameters():
        if not param.requires_grad:
            continue
        own = optimizer.state.get(param, {})
        state[name] = param.detach()
        state[f"{name}/step"] = torch.tensor(own.get("step", 0))
        kinds = ["exp_avg", "exp_avg_sq", *(["lo"] if param.dtype == torch.bfloat16 else [])]
        for kind in kinds:
            dtype = torch.int16 if kind == "lo" else torch.float32
            state[f"{name}/{kind}"] = own.get(kind, torch.zeros_like(param, dtype=dtype))
    return state


def killed_at(number: int, owner: Any, name: str, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed when it calls a function for the `number`-th time. Returns whether it
    was.
    """
    child = os.fork()
    if not child:
        left, plain = [number], getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(owner, name, count)
        try:
            work()
        finally:
            if sys.exc_info()[0]:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1 if sys.exc_info()[0] else 0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
