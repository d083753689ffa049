"""`benchmarks.prune` without a GPU: everything starts, and the targets are judged by the right figures."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import prune
from benchmarks.prune_models import model_folder
from benchmarks.prune_targets import TARGETS, markdown


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "cache"))


def measured(*names: str, to: Path) -> dict[str, Any]:
    prune.measure(list(names), to, tiny=True)
    found: dict[str, Any] = json.loads(to.read_text())
    assert list(found) == list(names) and not any("problem" in row for row in found.values())
    return found


def test_pruning_runs_are_measured_and_keep_to_their_plans(tmp_path: Path) -> None:
    found = measured("8b", "70b", "1b-plain", to=tmp_path / "part.json")
    few, one, plain = found.values()
    assert (few["layers"], few["variants"], few["tokens"]) == ("2 of 6, extrapolated", 10, 64)
    assert (one["layers"], one["variants"]) == ("1 of 6, extrapolated", 5) and one["all_layers_h"] is None
    assert few["host_gib"] > 0 and one["host_gib"] is None  # the peak of the process is the first case's
    for row in (few, one):
        assert row["is_finished"] and 0 <= row["planned_gpu_peak_gib"] - row["gpu_peak_gib"] < 1e-5
        assert 0 < row["importance_s"] < row["stages_s"] and row["replay_s"] > 0
        parts = [row[f"{key}_s"] for key in ("load", "make", "store", "cache")]
        assert all(seconds > 0 for seconds in parts) and sum(parts) < row["stages_s"]
    assert plain["variants"] == 12 and plain["tokens_variants_per_s"] > 0 and plain["losses_finite"]


def test_costs_are_those_of_the_models_that_are_built(tmp_path: Path) -> None:
    (found,) = measured("costs", to=tmp_path / "part.json").values()
    for name in ("teacher", "chosen"):
        for key in ("params", "memory_gib"):
            assert found[f"{name}_{key}"] == found[f"planned_{name}_{key}"]
        assert found[f"{name}_latency_s"] > 0 and found[f"planned_{name}_latency_s"] > 0
    assert found["chosen_params"] < 0.8 * found["teacher_params"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_loads_and_layers_without_values_take_no_space(tmp_path: Path, tied: bool) -> None:
    sizes: dict[str, int] = {"num_hidden_layers": 3}
    if tied:
        sizes |= dict(hidden_size=128, intermediate_size=512, num_attention_heads=4, head_dim=32, vocab_size=1024)
    folder = model_folder(tmp_path / "model", "llama-1b" if tied else "tiny", real=[1], **sizes)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == torch.bfloat16
    values = [bool(layer.mlp.up_proj.weight.any()) for layer in model.model.layers]
    assert values == [False, True, False] and model.model.embed_tokens.weight.any()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    blocks = [(folder / f"layer-{layer}.safetensors").stat().st_blocks for layer in range(3)]
    assert blocks[0] < blocks[1] / 10


@pytest.mark.full
def test_parts_are_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prune.py", "--out", str(tmp_path), "--tiny"])
    prune.main()
    found = json.loads((tmp_path / "prune.json").read_text())
    assert set(found["cases"]) == {case for part in prune.PARTS.values() for case in part.cases}
    assert not any("problem" in row for row in (*found["cases"].values(), *found["parts"].values()))
    text = (tmp_path / "prune.md").read_text()
    assert "no figure says anything about a machine" in text and "MISSED" not in text and "| met |" not in text


def test_what_has_no_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prune.py", "--out", str(tmp_path), "--tiny", "--limit", "1", "--parts", "70b"])
    prune.main()
    assert "Measure it with --parts 70b" in (tmp_path / "prune.md").read_text()


def judged(cases: dict[str, Any]) -> dict[str, str]:
    found = {"about": "", "is_tiny": False, "cases": cases, "peers": {}, "parts": {}}
    rows = [line.split(" | ") for line in markdown(found).splitlines() if line.startswith(("| 1B", "| 8B", "| 70B"))]
    return {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in rows}


def test_targets_are_met_and_missed() -> None:
    assert set(judged({}).values()) == {"not measured"} and len(judged({})) == len(TARGETS)
    figures = {"gpu_total_gib": 23.9, "planned_gpu_total_gib": 23.5, "gpu_peak_gib": 20.0, "planned_gpu_peak_gib": 21.0}
    found = judged({"8b": {**figures, "model_flops": 4.1e14}, "8b-full": {"model_flops": 5e14}})
    assert found["8B under 24 GiB: GPU with the CUDA context, GiB"] == "met"
    assert found["8B under 24 GiB: the same, % from the plan"] == "met"
    assert found["8B under 24 GiB: GPU peak of tensors, % from the plan"] == "MISSED"
    assert found["8B: model FLOP/s ÷ resident full fine-tuning"] == "met"
    found = judged({"1b": {"tokens_variants_per_s": 1.2}, "1b-plain": {"tokens_variants_per_s": 1.0}})
    assert found["1B: tokens × variants/s ÷ a plain loop"] == "MISSED"
    found = judged({"costs": {"chosen_params": 5.0, "planned_chosen_params": 5.0}})
    assert found["8B: parameters of the chosen model, % from predicted"] == "met"


def test_calls_fit_their_time() -> None:
    for call in ("8b,8b-full,1b", "scores,costs,distill", "70b"):
        assert f"--parts {call}" in str(prune.__doc__)
        assert sum(prune.PARTS[name].seconds for name in call.split(",")) <= 540
