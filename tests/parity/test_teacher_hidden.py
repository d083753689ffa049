"""Distillation after pruning reads the teacher's last hidden states that local training has left: the bits of a run whose
teacher runs.
"""

import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pruned
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outsize.base.errors import PlanInfeasible
from outsize.base.units import parse_bytes
from outsize.config.read import read_config
from outsize.model.build import build_model
from outsize.model.stack import LayerStack
from outsize.model.weights import is_unmaterialized
from outsize.run.adapters import materialize_head
from outsize.run.distill_batches import DistillBatches
from outsize.run.prune import PruneOutcome, prune_run
from outsize.run.prune_distill import distill
from outsize.run.prune_hidden import find_hidden
from outsize.run.prune_setup import PruneSetup, set_up
from outsize.run.teacher_hidden import FOLDER, HIDDEN, TeacherHidden

STEPS, SEQ = 4, 40
PRUNE: dict[str, Any] = {
    "tokens": 600, "num_key_value_heads": [], "skip": [], "linear": False, "copy": [], "target": {"params": 0.95},
    "distill": {"tokens": STEPS * SEQ * 4, "learning_rate": 1e-3}, "score_tokens": 64,
}  # fmt: skip
KEYS = {"sequence_len": SEQ, "excess_length_strategy": "truncate"}
"""Sixteen of fourteen rows: the second epoch has another order."""


def run(yaml: Path, *overrides: str) -> tuple[PruneOutcome, str]:
    console = Console(file=io.StringIO(), width=300, record=True)
    return prune_run(read_config(yaml, overrides), console), console.export_text()


def distilled(setup: PruneSetup, model: Path, name: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """A copy of a model, distilled: losses by step, weights, and what was printed."""
    copy = model.with_name(name)
    if not copy.exists():
        shutil.copytree(model, copy)
    console = Console(file=io.StringIO(), width=300, record=True)
    result = distill(setup, copy, console)
    assert result is not None
    return *result_of(result), console.export_text()


def result_of(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    (file,) = folder.glob("*model.safetensors")
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry], load_file(file)


def require_equal(one: Sequence[Any], other: Sequence[Any]) -> None:
    assert one[0] == other[0] and len(set(one[0])) == STEPS
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def planned_and_used(text: str) -> tuple[int, int]:
    (found,) = re.findall(r"^GPU +(\S+ \S+) of the simulated GPU at most, (\S+ \S+) planned", text, re.M)
    return parse_bytes(found[1], name="planned"), parse_bytes(found[0], name="used")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """A run that has left hidden states, in so little memory that the distillation itself is refused; its model, and
    the memory that it asks for.
    """
    folder = tmp_path_factory.mktemp("finished")
    yaml = pruned.write(folder, prune=PRUNE, **{**KEYS, "device": "sim:64MiB", "save_steps": 2})
    least = pruned.least_gpu_memory(yaml, "gpu_memory=1KiB")
    with pytest.raises(PlanInfeasible, match="the teacher's head needs") as refused:
        run(yaml, f"gpu_memory={least}B")
    (model,) = (path for path in (folder / "out" / "models").iterdir() if (path / "prune.json").exists())
    return yaml, model, refused.value.needed_bytes


def test_the_bits_of_a_teacher_that_runs_with_shuffled_rows(finished: tuple[Path, Path, int]) -> None:
    yaml, model, asked = finished
    setup = set_up(read_config(yaml))
    require_those_of_the_whole_teacher(setup)
    # What the refused run has asked for is enough.
    *result, text = distilled(set_up(read_config(yaml, [f"gpu_memory={asked}B"])), model, "read")
    planned, used = planned_and_used(text)
    assert used <= planned and "the teacher has 6.06 KiB GPU" in text and "are read from" in text
    # Killed in the middle, and resumed.
    shutil.copytree(model, model.with_name("killed"))
    assert pruned.killed_at(8, TeacherHidden, "read", lambda: distilled(setup, model, "killed"))
    *resumed, text = distilled(setup, model, "killed")
    assert "Resuming from" in text and "checkpoint-2" in text and "are read from" in text
    require_equal(resumed, result)
    # Without the hidden states.
    place = yaml.parent / "out" / FOLDER
    place.rename(place.with_name("elsewhere"))
    *streamed, text = distilled(setup, model, "streamed")
    place.with_name("elsewhere").rename(place)
    assert f"teacher  runs: the training of the variants has left no {place}" in text
    require_equal(streamed, result)


def test_packed_rows_after_a_kill_and_with_a_damaged_file(tmp_path: Path) -> None:
    how = {**PRUNE["distill"], "tokens": STEPS * 64 * 2}
    packed = {"bf16": False, "sample_packing": True, "sequence_len": 64, "micro_batch_size": 1, "save_steps": 2}
    yaml = pruned.write(tmp_path, "qwen3", prune={**PRUNE, "only_layers": [0], "distill": how}, **{**KEYS, **packed})
    # Killed while the hidden states are written: nothing of them is there, and the variants are finished.
    assert pruned.killed_at(3, LayerStack, "last_hidden_state", lambda: run(yaml))
    library, place = tmp_path / "out" / "library", tmp_path / "out" / FOLDER
    before = {path: path.stat().st_mtime_ns for path in library.rglob("*")}
    assert before and not place.exists() and list(place.parent.glob(f".partial-{FOLDER}*"))
    outcome, text = run(yaml)
    assert {path: path.stat().st_mtime_ns for path in library.rglob("*")} == before
    assert sorted(path.name for path in place.parent.glob("*teacher-hidden*")) == [FOLDER]
    assert f"its last hidden states are read from {place}" in text
    (model,) = outcome.models
    assert model.final is not None and model.final != model.trained
    result = model.folder.with_name(f"{model.folder.name}-distilled")
    require_those_of_the_whole_teacher(set_up(read_config(yaml)))
    # A file that was cut: the teacher runs, with the same bits.
    file = place / HIDDEN
    size = file.stat().st_size
    with file.open("r+b") as cut:
        cut.truncate(size - 1)
    *streamed, text = distilled(set_up(read_config(yaml)), model.folder, "streamed")
    assert f"teacher  runs: {place} is damaged" in text and f"{size - 1} bytes instead of {size}" in text
    require_equal(streamed, result_of(result))


def require_those_of_the_whole_teacher(setup: PruneSetup) -> None:
    """Computed without layers that run one by one, in the documented order of rows."""
    hidden, why = find_hidden(setup)
    assert hidden is not None and not why
    dtype = torch.bfloat16 if setup.config.bf16 else torch.float32
    teacher = AutoModelForCausalLM.from_pretrained(
        setup.config.base_model, dtype=dtype, attn_implementation=setup.config.attn_implementation
    ).eval()
    for k in range(len(hidden.record.shapes)):
        given = setup.train(k).arguments if setup.config.sample_packing else pruned.batch(setup, setup.config, k)[0]
        with torch.no_grad():
            expected = teacher.model(**given, use_cache=False).last_hidden_state
        assert torch.equal(hidden.read(k), expected)


def test_hidden_states_of_another_run_are_not_used(
    finished: tuple[Path, Path, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = finished[0]

    def why_not(*overrides: str) -> str:
        found, why = find_hidden(set_up(read_config(yaml, [f"output_dir={tmp_path}", *overrides])))
        assert (found is None) == bool(why)
        return why

    assert "has left no" in why_not()
    shutil.copytree(yaml.parent / "out" / FOLDER, tmp_path / FOLDER)
    assert not why_not()
    assert "order.seed was 42 and is 7" in why_not("data_seed=7")
    assert "order.is_sequential was False and is True" in why_not("train_sampling_strategy=sequential")
    assert "order.rows_per_batch was 2 and is 4" in why_not("micro_batch_size=4", "gradient_accumulation_steps=1")
    assert "the rows of the data have changed" in why_not("val_set_size=2")
    assert "bf16 was True and is False" in why_not("bf16=false")
    assert "it takes 9 steps, and the variants are trained for 5" in why_not(f"prune.distill.tokens={9 * 4 * SEQ}")
    assert "sdp_kernel: math holds only" in why_not("sdp_kernel=math")
    assert "has 8 batches of 10" in why_not(f"prune.distill.tokens={5 * 4 * SEQ}")
    record = tmp_path / FOLDER / "made_from.json"
    text = record.read_text()
    # Known only once the student is there: the CPU threads of its run, and its rows.
    setup = set_up(read_config(yaml, [f"output_dir={tmp_path}"]))
    batches = DistillBatches(order=setup.train.order, num_batches=8, hidden=find_hidden(setup)[0])
    rows = setup.train._rows
    assert batches.of(rows, is_on_gpu=False).hidden is not None
    assert batches.of(rows, is_on_gpu=True).hidden is None and "cpu_threads was" in caplog.text
    fewer = replace(rows, bounds=rows.bounds[1:], documents=rows.documents[1:])
    assert batches.of(fewer, is_on_gpu=False).hidden is None and "the rows of the data have changed" in caplog.text
    record.write_text(text.replace("bfloat16", "bfloat61"))
    assert "is damaged" in why_not()
    record.write_text(re.sub(r'"teacher": "..', '"teacher": "zz', text))
    assert "the teacher has changed" in why_not()


def test_only_the_head_of_the_teacher_has_weights(finished: tuple[Path, Path, int]) -> None:
    folder = finished[0].parent / "model"
    built = build_model(str(folder), dtype=torch.bfloat16)
    model: Any = materialize_head(built)
    expected = load_file(folder / "model.safetensors")
    assert torch.equal(model.lm_head.weight, expected["model.embed_tokens.weight"])  # they are tied
    others = [param for param in model.parameters() if param is not model.lm_head.weight]
    assert others and all(is_unmaterialized(param) for param in others)
