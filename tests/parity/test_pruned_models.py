"""From a library to models: scores, choices, folders of all forms, and what they compute."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pruned
import pytest
import torch
import yaml as yaml_module
from rich.console import Console
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from outsize.base.errors import ConfigError
from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.methods.bypass.choose import TargetInfeasible
from outsize.run.prune import PruneOutcome, prune_run
from outsize.run.prune_library import Library
from outsize.run.prune_setup import set_up
from outsize.run.prune_sweep import sweep_run

VARIANTS = {"intermediate_size": [24, 8], "num_key_value_heads": [1], "skip": ["attention", "ffn"], "linear": True}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished library of a small Llama."""
    folder = tmp_path_factory.mktemp("library")
    yaml = pruned.write(folder, prune={**VARIANTS, "copy": []}, val_set_size=4, bf16=False)
    assert pruned.run(yaml).is_finished
    return folder


def with_prune(library: Path, folder: Path, **prune: Any) -> Path:
    """A copy of the library's folder, and a run file with more keys under `prune`."""
    shutil.copytree(library / "out", folder / "out")
    settings = yaml_module.safe_load((library / "run.yaml").read_text())
    settings["prune"] |= prune
    settings["output_dir"] = str(folder / "out")
    path = folder / "run.yaml"
    path.write_text(yaml_module.safe_dump(settings))
    return path


def run(yaml: Path, *overrides: str) -> tuple[PruneOutcome, str]:
    console = Console(file=io.StringIO(), width=200, record=True)
    return prune_run(read_config(yaml, overrides), console), console.export_text()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()


@torch.no_grad()
def compared(yaml: Path, folder: Path) -> tuple[float, float]:
    """KL to the teacher and loss of a folder's model on the held-out rows, computed from whole models."""
    setup = set_up(read_config(yaml, ["output_dir=" + str(folder / "unused")]))
    assert setup.validation is not None
    teacher, model = load(Path(setup.config.base_model)), load(folder)
    kl, loss, tokens, labels = 0.0, 0.0, 0, 0
    for k in range(setup.num_validation):
        given = setup.validation(k)
        rows = torch.ones_like(given.arguments["input_ids"], dtype=torch.bool) if given.valid is None else given.valid
        one, other = (m(**given.arguments).logits.float() for m in (model, teacher))
        kl += kl_div(one.log_softmax(-1)[rows], other.log_softmax(-1)[rows], log_target=True, reduction="sum").item()
        wanted = given.labels[:, 1:]
        tokens, labels = tokens + int(rows.sum()), labels + int((wanted != -100).sum())
        loss += torch.nn.functional.cross_entropy(
            one[:, :-1].flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=-100
        ).item()
    return kl / tokens, loss / labels


def test_folders_are_what_was_chosen_and_evaluated(library: Path, tmp_path: Path) -> None:
    yaml = with_prune(library, tmp_path, target=[{"params": 0.85}, {"params": 0.6, "memory": 0.9}])
    outcome, text = run(yaml)
    assert len(outcome.models) == 2 and text.count("best possible") == 2
    curve = [line.split()[0] for line in text.splitlines() if "█" in line]
    assert curve == sorted(f"{made.chosen.predicted['params']:,.0f}" for made in outcome.models)
    for made in outcome.models:
        model, chosen = load(made.folder), made.chosen
        params = sum(each.numel() for each in model.parameters())
        assert (
            params
            == chosen.predicted["params"]
            <= chosen.target.limits["params"]["max_share"] * chosen.teacher["params"]
        )
        kl, loss = compared(yaml, made.folder)
        assert made.trained.kl == pytest.approx(kl, rel=1e-3, abs=1e-6) and made.trained.loss == pytest.approx(
            loss, rel=1e-5
        )
        facts = json.loads((made.folder / "prune.json").read_text())
        assert facts["evaluation"]["trained"]["kl"] == made.trained.kl and facts["gap"] == 0
        assert (made.folder / "tokenizer.json").exists() and f"{made.folder.name}" in text
        assert made.pruned.kl > 0 and made.teacher.kl == 0
    # The same targets again, and another: only the other is made, from stored scores.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    again, text = run(yaml, "prune.target=[{params: 0.85}, {params: 0.6, memory: 0.9}, {params: 0.7}]")
    assert text.count("is there already") == 2 and len(again.models) == 3
    assert [each.trained for each in again.models[:2]] == [each.trained for each in outcome.models]
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    changed = {path.relative_to(tmp_path / "out").parts[0] for path in after if after[path] != before.get(path)}
    assert changed <= {"models", "spec.json"} and before.keys() <= after.keys()


def test_forms(library: Path, tmp_path: Path) -> None:
    """Padded folders are of the plain class and compute the same; uniform ones are, and have fewer layers."""
    one = with_prune(library, tmp_path, target={"params": 0.7}, linear=False)
    (per_layer,) = run(one)[0].models
    (padded,) = run(one, "prune.form=padded")[0].models
    assert per_layer.folder != padded.folder
    assert type(load(padded.folder)) is LlamaForCausalLM
    teacher = load(library / "model")
    assert load(padded.folder).num_parameters() == teacher.num_parameters()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        found, expected = (load(each.folder)(tokens).logits for each in (padded, per_layer))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (uniform,) = run(one, "prune.shape=uniform", "prune.target={params: 0.6}")[0].models
    model = load(uniform.folder)
    assert (
        type(model) is LlamaForCausalLM and json.loads((uniform.folder / "prune.json").read_text())["form"] == "uniform"
    )
    assert model.num_parameters() <= 0.6 * teacher.num_parameters()
    kl, _ = compared(one, uniform.folder)
    assert uniform.trained.kl == pytest.approx(kl, rel=1e-3, abs=1e-6)


def test_impossible_targets_and_forms(library: Path, tmp_path: Path) -> None:
    yaml = with_prune(library, tmp_path)
    with pytest.raises(TargetInfeasible, match="Keep the other limits and change one to: params"):
        run(yaml, "prune.target={params: 0.01}")
    with pytest.raises(ConfigError, match="the chosen layers differ"):
        run(yaml, "prune.target={params: 0.7}", "prune.form=uniform")
    only_linear = ["prune.skip=null", "prune.num_key_value_heads=null", "prune.intermediate_size=null"]
    with pytest.raises(ConfigError, match="cannot express"):
        run(yaml, "prune.target={params: 0.95}", "prune.form=padded", *only_linear)


def test_scores_by_local_losses_and_costs_from_a_file(library: Path, tmp_path: Path) -> None:
    rows = ["outside", "attention-teacher", "attention-kv1", "attention-linear", "attention-skip"]
    rows += ["ffn-teacher", "ffn-24", "ffn-8", "ffn-skip"]
    table = {name: {"prefill_seconds": len(rows) - n, "decode_seconds": 0} for n, name in enumerate(rows)}
    (tmp_path / "costs.json").write_text(json.dumps(table))
    yaml = with_prune(library, tmp_path, score="local", costs=str(tmp_path / "costs.json"))
    (made,) = run(yaml, "prune.target={latency: 0.7}")[0].models
    assert made.chosen.predicted["latency"] <= 0.7 * made.chosen.teacher["latency"]
    assert not (tmp_path / "out" / "scores.json").exists()
    del table["ffn-8"]
    (tmp_path / "costs.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="has no ffn-8"):
        run(yaml, "prune.target={latency: 0.6}")


def test_latency_is_measured_here(library: Path, tmp_path: Path) -> None:
    yaml = with_prune(library, tmp_path, target={"latency": 0.9, "context": 8, "decoded": 2})
    (made,) = run(yaml)[0].models
    assert made.chosen.predicted["latency"] <= 0.9 * made.chosen.teacher["latency"]


def test_distillation_of_a_chosen_model(library: Path, tmp_path: Path) -> None:
    how = {"tokens": 24 * 4 * 6, "learning_rate": 1e-4}
    yaml = with_prune(library, tmp_path, target={"params": 0.6}, distill=how)
    (made,) = run(yaml)[0].models
    result = made.folder.with_name(f"{made.folder.name}-distilled")
    assert made.final is not None and made.final != made.trained
    kl, loss = compared(yaml, result)
    assert made.final.kl == pytest.approx(kl, rel=1e-3, abs=1e-6) and made.final.loss == pytest.approx(loss, rel=1e-5)
    assert load(result).num_parameters() == made.chosen.predicted["params"]
    (again,) = run(yaml)[0].models
    assert again.final == made.final
    facts = json.loads((result / "prune.json").read_text())
    assert facts["evaluation"]["final"]["kl"] == made.final.kl and facts["variants"]
    with pytest.raises(ConfigError, match=r"prune.distill: .*-distilled was trained with .*'learning_rate': 0.0001"):
        run(yaml, "prune.distill.learning_rate=1e-3")
    shown = CliRunner().invoke(app, ["prune", "--show", str(tmp_path / "out")]).output
    assert "-distilled" in shown and f"{made.final.loss:.4f}" in shown


def test_commands(library: Path, tmp_path: Path) -> None:
    yaml = with_prune(library, tmp_path)
    (tmp_path / "out" / "library" / "000" / "ffn-8").rename(tmp_path / "ffn-8")
    command = lambda *words: CliRunner().invoke(app, ["prune", *map(str, words)])
    made = command(yaml, "--only", "choose", "--set", "prune.target.params=0.7")
    assert made.exit_code == 0 and "the others are left out" in made.output and "best possible" in made.output
    assert not (tmp_path / "out" / "library" / "000" / "ffn-8").exists()
    shown = command("--show", tmp_path / "out")
    assert shown.exit_code == 0 and "ffn-24" in shown.output and "params-0.7" in shown.output
    assert "missing" in command(yaml, "--only", "choose").output
    assert "has no library" in command("--show", tmp_path).output
    assert command().exit_code == 2


SWEEP = [{"intermediate_size": [24]}, {"num_key_value_heads": [3]}, {"skip": ["ffn"], "num_key_value_heads": [1]}]


def sweep(folder: Path) -> Path:
    return pruned.write(folder, prune={**{name: None for name in pruned.VARIANTS}, "sweep": SWEEP}, save_steps=2)


def files_of(folder: Path) -> dict[str, bytes]:
    weights = sorted((folder / "out" / "sweep").rglob("library/**/*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in weights}


def test_sweep_goes_on_after_a_failing_entry_and_after_a_kill(tmp_path: Path) -> None:
    """D6: entries are independent of others having failed, been killed or resumed."""
    console = Console(file=io.StringIO(), width=200, record=True)
    failed = sweep_run(sweep(tmp_path / "clean"), [], console)
    assert len(failed) == 1 and "num_key_value_heads: 3 does not divide" in failed[0]
    clean = files_of(tmp_path / "clean")
    assert len({name.split("/")[2] for name in clean}) == 2
    # Killed in an entry, with its states on disk; then the same command, with the entries in another order.
    yaml = sweep(tmp_path / "killed")
    assert pruned.killed_at(6, Library, "finish", lambda: sweep_run(yaml, [], console))
    held = files_of(tmp_path / "killed")
    assert 0 < len(held) < len(clean) and list((tmp_path / "killed").rglob("training/**/*.safetensors"))
    settings = yaml_module.safe_load(yaml.read_text())
    settings["prune"]["sweep"] = SWEEP[::-1]
    yaml.write_text(yaml_module.safe_dump(settings))
    again = sweep_run(yaml, [], console)
    assert len(again) == 1 and files_of(tmp_path / "killed") == clean
    # Everything is finished: nothing is trained again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("*.safetensors")}
    sweep_run(yaml, [], console)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("*.safetensors")}
