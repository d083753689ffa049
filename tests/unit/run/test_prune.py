"""`outsize prune`: what a run continues from, what it refuses, and that variants do not affect one another."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pruned
import pytest
import torch
import yaml as pyyaml
from safetensors.torch import load_file, save_file

from outsize.base.errors import BadFile, ConfigError, OutsizeError
from outsize.device.choose import choose_device
from outsize.methods.bypass.train import LayerTraining
from outsize.run import prune_measure
from outsize.run.prune_library import LATEST, Library
from outsize.run.prune_spec import PruneSpec

SMALL = {"intermediate_size": [24], "num_key_value_heads": [1], "skip": [], "linear": False, "copy": [], "tokens": 180}
"""Two variants, of two layers, for three steps."""


def write(folder: Path, *, prune: dict[str, Any] | None = None, **keys: Any) -> Path:
    given = {"val_set_size": 2, "eval_steps": 2, "save_steps": 1, **keys}
    return pruned.write(folder, prune={**SMALL, "only_layers": [0, 2], "keep": "both", **(prune or {})}, **given)


def entry_times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted((folder / "library").rglob("*.json"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    assert pruned.run(write(folder)).is_finished
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The run file of a copy of the finished run, in a folder of its own."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "run.yaml").read_text().replace(str(finished), str(tmp_path))
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path / "run.yaml"


# --- continuing


def signaled(number: int, signal_number: int, yaml: Path, *overrides: str) -> None:
    """Run in another process, which gets a signal at the `number`-th step of any layer."""
    plain, left = LayerTraining.step, [number]

    def step(self: LayerTraining, *args: Any) -> None:
        plain(self, *args)
        left[0] -= self.num_validation > 0  # not while the plan is made
        if not left[0]:
            os.kill(os.getpid(), signal_number)

    child = os.fork()
    if not child:
        LayerTraining.step = step  # type: ignore[method-assign]
        try:
            outcome = pruned.run(yaml, *overrides)
            os._exit(3 if outcome.is_finished else 4)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL if os.WIFSIGNALED(status) else os.WEXITSTATUS(status) == 4


@pytest.mark.parametrize(
    ("signal_number", "at"),
    [
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.full),
        (signal.SIGKILL, 5),
        (signal.SIGINT, 2),
        pytest.param(signal.SIGINT, 6, marks=pytest.mark.full),
    ],
)
def test_d1_d2_d12_a_stopped_run_continues_to_the_same_bits(
    tmp_path: Path, finished: Path, signal_number: int, at: int
) -> None:
    yaml = write(tmp_path)
    signaled(at, signal_number, yaml)
    assert pruned.run(yaml).is_finished
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(finished / "out"))
    assert not list((tmp_path / "out" / "training").rglob("*.safetensors"))


@pytest.mark.parametrize("way", ["file", "rounds", "groups"])
def test_d7_a_killed_run_continues_with_other_memory(tmp_path: Path, finished: Path, way: str) -> None:
    yaml = write(tmp_path)
    made = pruned.run(yaml, dry_run=True).plan
    smaller = [f"host_memory={made.host_bytes - 1}"]
    if way == "groups":
        smaller = [
            "device=sim:64MiB",
            f"gpu_memory={pruned.least_gpu_memory(yaml, 'device=sim:64MiB', 'gpu_memory=1KiB')}B",
        ]
    smaller += [f"prune.cache_dir={tmp_path / 'cache'}"] if way == "file" else []
    signaled(4, signal.SIGKILL, yaml, *smaller)
    assert pruned.run(yaml).is_finished
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(finished / "out"))


@pytest.mark.full
@pytest.mark.parametrize("function", ["fsync", "unlink", "rmdir", "pwrite", "open"])
@pytest.mark.parametrize("way", ["memory", "file", "rounds"])
def test_d7_a_run_killed_at_every_tenth_file_boundary_continues(
    tmp_path: Path, finished: Path, function: str, way: str
) -> None:
    yaml = write(tmp_path)
    made = pruned.run(yaml, dry_run=True).plan
    overrides = [f"host_memory={made.host_bytes - 1}"] if way != "memory" else []
    overrides += [f"prune.cache_dir={tmp_path / 'cache'}"] if way == "file" else []
    for number in range(1, 10_000, 10):
        out = tmp_path / str(number)
        chosen = [*overrides, f"output_dir={out}"]
        was_killed = pruned.killed_at(number, os, function, lambda: pruned.run(yaml, *chosen))  # noqa: B023
        assert pruned.run(yaml, *chosen).is_finished
        pruned.require_equal(pruned.library(out), pruned.library(finished / "out"))
        if not was_killed:
            return
    raise AssertionError("never finished")


def test_d4_a_finished_run_is_recognized(copied: Path) -> None:
    before = entry_times(copied.parent / "out")
    assert before and pruned.run(copied).is_finished
    assert entry_times(copied.parent / "out") == before


def test_added_variants_and_layers_are_trained_and_the_others_stay(copied: Path) -> None:
    out = copied.parent / "out"
    before = entry_times(out)
    pruned.run(copied, "prune.intermediate_size=[24, 16]", "prune.only_layers=[0, 1]")
    after = entry_times(out)
    assert before.items() <= after.items()
    assert {path.name for path in (out / "library" / "001").iterdir()} == {"ffn-24", "ffn-16", "attention-kv1"}
    spec = json.loads((out / "spec.json").read_text())
    assert spec["variants"] == ["ffn-24", "attention-kv1", "ffn-16"]


def test_more_tokens_continue_finished_variants_with_their_optimizer(copied: Path, tmp_path: Path) -> None:
    pruned.run(copied, "prune.tokens=400")
    found = Library(copied.parent / "out").entry(2, "ffn-24")
    assert found is not None and found.description.steps > 3 and found.description.tokens >= 400
    assert [step for step, _ in found.description.losses] == list(range(1, found.description.steps + 1))


def test_more_tokens_leave_finished_variants_without_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = write(tmp_path, prune={"keep_optimizer": False, "only_layers": [0]})
    pruned.run(yaml)
    before = entry_times(tmp_path / "out")
    pruned.run(yaml, "prune.tokens=400", "prune.only_layers=[0, 1]")
    assert before.items() <= entry_times(tmp_path / "out").items()
    assert "2 finished variants stay as they are, with 3 steps" in caplog.text
    longer = Library(tmp_path / "out").entry(1, "ffn-24")
    assert longer is not None and longer.description.steps > 3


def test_d5_the_state_with_the_most_steps_counts(copied: Path) -> None:
    """A finished variant, and a newer state under a longer budget."""
    signaled(1, signal.SIGKILL, copied, "prune.tokens=400", "prune.only_layers=[0]")
    library = Library(copied.parent / "out")
    entry, state = library.entry(0, "ffn-24"), library.state(0, "ffn-24")
    assert entry is not None and entry.description.steps == 3
    steps = []
    plain = LayerTraining.step

    def step(self: LayerTraining, active: Any, number: int, tokens: int) -> None:
        steps.extend([number] if self.num_validation else [])
        plain(self, active, number, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerTraining, "step", step)
        pruned.run(copied, "prune.tokens=400", "prune.only_layers=[0]")
    assert min(steps) == (3 if state is None else state.description.steps)


# --- identity


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["learning_rate=1e-3"], "learning_rate was 0.01 and is 0.001"),
        (["data_seed=7", "seed=7"], "seed was 42 and is 7"),
        (["prune.loss=mse"], "prune.loss was nmse and is mse"),
        (["prune.learn=ffn", "prune.num_key_value_heads=[]"], "prune.learn was ffn, mixer and is ffn"),
        (["prune.tokens=100"], "prune.tokens was 180 and is 100. A run can be made longer, not shorter"),
        (["gradient_accumulation_steps=1"], "gradient_accumulation_steps was 2 and is 1"),
        (["bf16=false"], "bf16 was True and is False"),
    ],
)
def test_d3_changed_settings_are_refused_by_name(copied: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pruned.run(copied, *overrides)
    assert named in str(caught.value) and "set another output_dir" in str(caught.value)
    assert str(caught.value).count("\n") == (4 if "seed" in named else 2)  # the seed also chooses validation rows


def test_d3_changed_data_and_teacher_are_refused_and_moved_ones_accepted(copied: Path) -> None:
    folder = copied.parent
    before = entry_times(folder / "out")
    (folder / "model").rename(folder / "moved")
    (folder / "data.jsonl").rename(folder / "moved.jsonl")
    moved = [f"base_model={folder / 'moved'}", f"datasets=[{folder / 'moved.jsonl'}]"]
    assert pruned.run(copied, *moved, "host_memory=8GiB").is_finished and entry_times(folder / "out") == before
    lines = (folder / "moved.jsonl").read_text().splitlines()
    (folder / "moved.jsonl").write_text("\n".join([*lines[:-1], lines[0]]) + "\n")
    with pytest.raises(ConfigError, match="datasets: the rows have changed since the run began"):
        pruned.run(copied, *moved)
    (folder / "moved.jsonl").write_text("\n".join(lines) + "\n")
    weights = load_file(folder / "moved" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "moved" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="base_model: the config or weights of the teacher have changed"):
        pruned.run(copied, *moved)


def test_d6_runs_of_a_sweep_do_not_affect_one_another(tmp_path: Path, finished: Path) -> None:
    """Files with folders of their own, in one process, the first one killed and continued."""
    yaml = write(tmp_path)
    other = tmp_path / "other.yaml"
    given = pyyaml.safe_load(yaml.read_text())
    given["prune"] |= {"intermediate_size": [16]}
    other.write_text(pyyaml.safe_dump({**given, "output_dir": str(tmp_path / "second")}))
    signaled(3, signal.SIGKILL, yaml)
    for file in (yaml, other):
        pruned.run(file)
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(finished / "out"))
    assert (0, "ffn-16") in pruned.library(tmp_path / "second")


def test_the_spec_has_no_setting_left_open(copied: Path) -> None:
    spec = json.loads((copied.parent / "out" / "spec.json").read_text())
    assert spec["steps"] == 3 and spec["seed"] == 42 and spec["keep"] == "both" and len(spec["teacher"]) == 32
    assert spec.keys() == {name for name in PruneSpec.__slots__}


# --- variants are independent


def test_d14_other_variants_change_no_bits(tmp_path: Path, finished: Path) -> None:
    yaml = write(tmp_path, prune={"intermediate_size": [8, 24, 40], "copy": ["ffn"], "only_layers": [2]})
    pruned.run(yaml)
    mine, theirs = pruned.library(tmp_path / "out"), pruned.library(finished / "out")
    keys = [key for key in theirs if key[0] == 2]
    pruned.require_equal({key: mine[key] for key in keys}, {key: theirs[key] for key in keys})


def test_d16_a_copy_has_no_loss_and_no_gradients(tmp_path: Path) -> None:
    yaml = write(tmp_path, prune={"copy": ["attention", "ffn"]}, weight_decay=0.0)
    pruned.run(yaml)
    teacher = load_file(tmp_path / "model" / "model.safetensors")
    for (layer, name), found in pruned.library(tmp_path / "out").items():
        if name.endswith("copy"):
            assert all(loss == 0 for _, loss in found.losses)
            for key, tensor in found.weights.items():
                assert torch.equal(tensor, teacher[f"model.layers.{layer}.{key}"])


def test_d25_a_variant_that_is_not_finite_is_stopped_and_the_others_are_not(tmp_path: Path, finished: Path) -> None:
    yaml = write(tmp_path)
    plain = LayerTraining.run_batch

    def run_batch(self: LayerTraining, place: int, active: Any, *, writes: bool) -> int:
        tokens = plain(self, place, active, writes=writes)
        for trainee in active:
            if trainee.variant.learn == "ffn" and trainee.progress.step == 1:
                next(iter(trainee.flat._gradients.values())).view(-1)[0] = float("inf")
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerTraining, "run_batch", run_batch)
        pruned.run(yaml)
    mine, theirs = pruned.library(tmp_path / "out"), pruned.library(finished / "out")
    keys = [key for key in theirs if key[1] == "attention-kv1"]
    pruned.require_equal({key: mine[key] for key in keys}, {key: theirs[key] for key in keys})
    stopped = Library(tmp_path / "out").entry(0, "ffn-24")
    assert stopped is not None and stopped.description.steps == 1
    assert stopped.description.stopped.startswith("step 2: ") and "not finite" in stopped.description.stopped
    before = entry_times(tmp_path / "out")
    assert pruned.run(yaml).is_finished and entry_times(tmp_path / "out") == before


def test_d18_what_is_not_learned_keeps_its_bits(tmp_path: Path) -> None:
    yaml = write(tmp_path, prune={"learn": "ffn", "num_key_value_heads": [], "copy": []})
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    pruned.run(yaml)
    assert {name for _, name in pruned.library(tmp_path / "out")} == {"ffn-24"}
    tensors = {name for found in pruned.library(tmp_path / "out").values() for name in found.weights}
    assert not any("self_attn" in name for name in tensors)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_d11_dropout_of_the_teacher_does_not_run(tmp_path: Path, finished: Path) -> None:
    yaml = write(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    pruned.run(yaml)
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(finished / "out"))


def test_d15_the_content_of_padding_changes_nothing(tmp_path: Path, finished: Path) -> None:
    yaml = write(tmp_path, special_tokens={"pad_token": "</s>"})
    pruned.run(yaml)
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(finished / "out"))


# --- budgets


def test_on_sim_every_budget_from_the_minimum_is_kept_and_predicted(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"device": "sim:64MiB", "pad_to_sequence_len": True}
    yaml = write(tmp_path, prune={"intermediate_size": [40, 24], "only_layers": [0]}, **keys)
    least = pruned.least_gpu_memory(yaml, "gpu_memory=1KiB")
    assert pruned.least_gpu_memory(yaml, f"gpu_memory={least - 1}B") == least
    everything = pruned.run(yaml, dry_run=True).plan.gpu_total
    groups = []
    for number, budget in enumerate((least, (least + everything) // 2, everything)):
        outcome = pruned.run(yaml, f"gpu_memory={budget}B", f"output_dir={tmp_path / str(number)}")
        assert outcome.gpu_peak_bytes == outcome.plan.gpu_bytes <= budget
        groups.append(outcome.plan.num_groups)
    assert groups[0] > groups[-1] == 1
    pruned.require_equal(pruned.library(tmp_path / "0"), pruned.library(tmp_path / "2"))


def test_one_variant_at_a_time_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write(tmp_path, prune={"intermediate_size": [40, 24], "only_layers": [0]}, device="sim:64MiB")
    device, live, plain = choose_device("sim:64MiB"), list[int](), prune_measure.FlatModule

    def counted(*args: Any) -> Any:
        live.append(device.observer.live_bytes)
        return plain(*args)

    monkeypatch.setattr(prune_measure, "FlatModule", counted)
    pruned.run(yaml, dry_run=True)
    assert len(live) == 3 and len(set(live)) == 1


# --- bad input


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["prune.intermediate_size=[64]"], r"intermediate_size: 64 .*48"),
        (["prune.num_key_value_heads=[3]"], r"num_key_value_heads: 3 "),
        (["prune.tokens=20"], r"prune.tokens: 20 tokens are fewer than the \d+ of one step"),
        (["micro_batch_size=500"], r"datasets: \d+ rows are fewer than the 1000 of one step"),
        (["prune.only_layers=[9]"], r"prune.only_layers: there is no layer 9; the teacher has layers 0 to 3"),
        (["prune.experts=[2]"], r"prune.experts: no layer that is pruned has a part"),
        (["prune.num_heads=3"], r"prune.num_heads: unknown key"),
        (["datasets=[nowhere.jsonl]"], r"nowhere.jsonl"),
        (["prune.blocks=model.nothing"], r"model.nothing"),
        (["datasets=[/dev/null]"], r"/dev/null"),
        (["prune.intermediate_size=[0]"], r"prune.intermediate_size.*0"),
        (["prune.intermediate_size=[1.5]"], r"prune.intermediate_size.*1.5"),
        (["prune.intermediate_size=[-24]"], r"prune.intermediate_size.*-24"),
        (["prune.intermediate_size=[0.001]"], r"intermediate_size: 0.001 of the 48 channels .* is 0. Name a width"),
        (["prune.num_key_value_heads=[0]"], r"prune.num_key_value_heads"),
        (["prune.num_key_value_heads=[4]"], r"num_key_value_heads: 4 does not divide the teacher's 2"),
        (["prune.tokens=0"], r"prune.tokens.*0"),
        (["prune.skip=[norm]"], r"prune.skip.*norm"),
        (["prune.learn=everything"], r"prune.learn.*everything"),
        (["prune.loss=l1"], r"prune.loss.*l1"),
        (["prune.target={params: -1}"], r"-1"),
        (["prune.target={params: {most: 1}}"], r"most"),
        (["prune.target={params: {min: 0.9, max: 0.5}}"], r"min is above max"),
        (["prune.target={size: 1}"], r"size"),
        (["prune.target={latency: fast}"], r"fast"),
        (["prune.costs=/nowhere.json", "prune.target={params: 0.9}"], r"prune.costs: /nowhere.json cannot be read"),
        (["lr_scheduler=reduce_lr_on_plateau"], r"lr_scheduler"),
        (["prune.copy=null", "prune.intermediate_size=null", "prune.num_key_value_heads=null"], r"prune"),
        (["output_dir=/proc/none"], r"output_dir: /proc/none cannot be written"),
        (["host_memory=10KiB"], r"host_memory 10.0 KiB is too small: .* set prune.cache_dir"),
    ],
)
def test_bad_input_has_one_message(tmp_path: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(OutsizeError, match=expected):
        pruned.run(write(tmp_path), *overrides)


def test_a_damaged_entry_is_named_and_made_again_once_it_is_removed(copied: Path, finished: Path) -> None:
    entry = copied.parent / "out" / "library" / "002" / "ffn-24"
    (entry / LATEST).write_bytes((entry / LATEST).read_bytes()[:-9])
    with pytest.raises(BadFile, match=r"ffn-24 is damaged: .*Remove this folder; the same command makes it again"):
        pruned.run(copied)
    shutil.rmtree(entry)
    pruned.run(copied)
    pruned.require_equal(pruned.library(copied.parent / "out"), pruned.library(finished / "out"))


def test_code_of_a_folder_runs_only_if_it_is_allowed(tmp_path: Path) -> None:
    yaml = write(tmp_path)
    path = tmp_path / "model" / "config.json"
    own = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}, "model_type": "own"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (tmp_path / "model" / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ConfigError, match=r"has model code of its own .* set prune.trust_remote_code: true"):
        pruned.run(yaml)
    assert pruned.run(yaml, "prune.trust_remote_code=true", "prune.only_layers=[0]").is_finished


def test_outsize_train_refuses_the_file(tmp_path: Path) -> None:
    from outsize.config.read import read_config
    from outsize.run.assemble import assemble

    with pytest.raises(ConfigError, match="prune: is for `outsize prune`"):
        assemble(read_config(write(tmp_path)))
