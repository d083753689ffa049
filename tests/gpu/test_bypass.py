"""Pruning on CUDA: layers replay, students train with the bits of the reference, and scores are those of the CPU.

Run with CUBLAS_WORKSPACE_CONFIG=:4096:8, as torch's deterministic mode asks for.
"""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pruned
import pytest
import torch
from kinds.text import DECODERS, STATE_SPACES
from pruning import student, variant
from rich.console import Console
from torch import Tensor, nn

from benchmarks.prune_models import model_folder, run_config
from outsize.base.errors import PlanInfeasible
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.methods.bypass.importance import Importance, LayerImportance
from outsize.methods.bypass.layouts import inspect_layer
from outsize.methods.bypass.losses import nmse
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.subblocks import record
from outsize.model.stack import LayerStack, run
from outsize.optim.adamw import AdamW
from outsize.optim.flat import FlatModule, new_scratch
from outsize.reference import AdamW as Reference
from outsize.run.prune import PruneOutcome, prune_run

pytestmark = pytest.mark.gpu
KINDS = ("llama", "qwen3", "gpt2", "gemma3", "phi3", "mixtral", "gpt-oss", "deepseek-v3", "mamba2", "cohere2")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def device() -> Device:
    return choose_device("cuda")


def model_on(kind: str, dtype: torch.dtype, place: torch.device) -> nn.Module:
    made: nn.Module = {**DECODERS, **STATE_SPACES}[kind].make()
    return made.to(dtype).to(place).eval()


def first_layer(model: nn.Module) -> tuple[LayerParts, Any, Tensor]:
    stack = LayerStack(model)
    place = next(model.parameters()).device
    tokens = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0)).to(place)
    captured = stack.capture({"input_ids": tokens})
    layer, call = stack.layers[0], captured.calls[0]
    return inspect_layer(layer.name, layer.module, stack.config, call, captured.hidden), call, captured.hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_replay(kind: str, dtype: torch.dtype, device: Device) -> None:
    model = model_on(kind, dtype, device.torch_device)
    tokens = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    LayerStack(model).check_replay({"input_ids": tokens})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral", "gpt-oss"])
def test_students_train_with_the_bits_of_the_reference(kind: str, dtype: torch.dtype, device: Device) -> None:
    parts, call, hidden = first_layer(model_on(kind, dtype, device.torch_device))
    _, runs = record(parts.layer, parts.subblocks, parts.subblocks.keys(), call, hidden)
    spec = AdamW(betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)
    for one in (variant("intermediate_size", 24), variant("num_key_value_heads", 1)):
        mine, plain = (student(parts, one) for _ in range(2))
        flat = FlatModule(mine, spec, device, new_scratch(device, spec))
        reference = Reference(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)
        for _ in range(3):
            losses = []
            for made in (mine, plain):
                loss = nmse(made(runs[one.learn]), runs[one.learn].target, None)
                loss.backward()
                losses.append(loss.detach())
            norm = flat.step(1e-2).norm
            reference.step()
            reference.zero_grad()
            assert torch.equal(*losses) and norm == reference.grad_norm.item()
        state = flat.state()
        for name, param in plain.named_parameters():
            assert torch.equal(state[name], param)
            for key, value in reference.state.get(param, {}).items():
                assert torch.equal(state[f"{name}/{key}"].cpu().double(), torch.as_tensor(value).cpu().double())


@pytest.mark.parametrize("method", ["independent", "iterative"])
@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral"])
def test_scores_are_those_of_the_cpu(kind: str, method: Any, device: Device) -> None:
    found: list[LayerImportance] = []
    for place in (device.torch_device, torch.device("cpu")):
        parts, call, hidden = first_layer(model_on(kind, torch.float32, place))
        importance = Importance(parts, method)
        with torch.no_grad():
            assert torch.equal(importance.run(call, hidden, None), run(parts.layer, call, hidden))
        found.append(importance.scores())
    for (name, one), other in zip(found[0].tensors().items(), found[1].tensors().values(), strict=True):
        if method == "iterative" and name.startswith("channels"):  # places, of which close ones may be exchanged
            assert (one.flatten() - other.flatten()).abs().mean() < 1
        else:
            assert torch.allclose(one, other, rtol=1e-2, atol=1e-6), name


def pruned_with(
    folder: Path, out: str, gpu_memory: str, *, host_memory: str = "8GiB", dry_run: bool = False, **keys: Any
) -> PruneOutcome:
    model = model_folder(folder / "model", "llama-1b", layers=2, vocab_size=2048)
    variants = {"intermediate_size": [6592, 1728], "num_key_value_heads": [2], "keep": "latest", "keep_optimizer": True}
    config = run_config(
        folder,
        model,
        rows=4,
        seq=256,
        tokens=8192,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        prune={"tokens": 8192, "importance_tokens": 2048, **variants, **keys},
    )
    config = dataclasses.replace(config, output_dir=str(folder / out))
    return prune_run(config, Console(file=io.StringIO()), dry_run=dry_run)


def least_with(folder: Path) -> int:
    try:
        pruned_with(folder, "least", "1KiB", dry_run=True)
    except PlanInfeasible as error:  # not held: its frames have tensors
        return error.needed_bytes
    raise AssertionError("it fits")


def test_runs_keep_to_their_plans_and_to_their_bits(tmp_path: Path) -> None:
    """In one group and in several, with hidden states in host memory and in a file."""
    roomy = pruned_with(tmp_path, "roomy", "16GiB")
    tight = pruned_with(tmp_path, "tight", f"{least_with(tmp_path) + 2**26}B")
    assert tight.plan.num_groups > roomy.plan.num_groups == 1
    for outcome in (roomy, tight):
        assert outcome.is_finished and outcome.gpu_peak_bytes == pytest.approx(outcome.plan.gpu_bytes, rel=0.03)
        assert outcome.plan.seconds > 0
    expected = pruned.library(tmp_path / "roomy")
    pruned.require_equal(pruned.library(tmp_path / "tight"), expected)
    less = f"{roomy.plan.host_bytes - 1}B"
    in_file = pruned_with(tmp_path, "in_file", "16GiB", host_memory=less, cache_dir=str(tmp_path / "cache"))
    assert in_file.plan.in_file
    pruned.require_equal(pruned.library(tmp_path / "in_file"), expected)
