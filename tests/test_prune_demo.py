"""`make prune-demo`: training recovers most of what pruning costs, and importance is better than keeping the first."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.prune_small import Figures, by_rate
from examples import prune
from examples.prune import TEACHER
from tools import byte_teacher


def test_the_teacher_is_small() -> None:
    files = list(TEACHER.iterdir())
    assert files and sum(path.stat().st_size for path in files) <= 3_000_000
    with safe_open(TEACHER / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) <= 1_500_000  # noqa: SIM118


def test_a_token_is_a_byte() -> None:
    text = "import os\n\tprint('ü')"
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_what_losses_are_measured_on_is_no_training_data(tmp_path: Path) -> None:
    held_out = set(prune.texts(held_out=True))
    assert held_out and not held_out & {*prune.texts(), *byte_teacher.texts()}
    prune.write_run(tmp_path)
    train, measured = (
        {json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "held_out")
    )
    assert measured and measured <= held_out and not train & held_out


def test_the_teacher_knows_python() -> None:
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    text = prune.texts(held_out=True)[0]
    ids = torch.tensor([list(text.encode())[:128]])
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 2.5


def test_each_seed_has_its_best_rate() -> None:
    losses = {1e-3: (2.0, 1.0), 2e-3: (1.5, 3.0)}
    found = {("alone", rate): [Figures(loss, 0.0) for loss in some] for rate, some in losses.items()}
    assert by_rate(found)[-1] == "| alone | best of each seed | 1.5000, 1.0000 | 1.2500 | |"


@pytest.mark.full
def test_training_recovers_the_loss_and_importance_beats_truncation(tmp_path: Path) -> None:
    outcome = prune.main(tmp_path, console=Console(file=io.StringIO(), width=104))
    assert outcome.recovered >= 0.85
    assert all(important.loss < first.loss for important, first in outcome.by_width.values())
    # Evaluated in transformers, which the pipeline's figures do not come from.
    model = AutoModelForCausalLM.from_pretrained(outcome.model.folder, dtype=torch.float32).eval()
    assert (model.config.intermediate_size, model.config.num_key_value_heads) == (prune.WIDTH, prune.HEADS)
    assert sum(param.numel() for param in model.parameters()) == outcome.model.chosen.predicted["params"]
    assert loss_of(model, tmp_path / "held_out.jsonl") == pytest.approx(outcome.model.trained.loss, abs=1e-5)


@torch.no_grad()
def loss_of(model: Any, path: Path) -> float:
    """Row by row."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    rows = [row for text in texts for row in torch.tensor([*text.encode(), 0]).split(prune.TOKENS) if len(row) > 1]
    losses, tokens = 0.0, 0
    for row in rows[: len(rows) // 8 * 8]:  # the pipeline evaluates whole batches
        losses += float(model(input_ids=row[None], labels=row[None]).loss) * (len(row) - 1)
        tokens += len(row) - 1
    return losses / tokens
