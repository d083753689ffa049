"""`make prune-demo`: prunes a small Llama on bytes to a quarter of its feed-forward width and KV heads, in all layers.

`outsize prune` measures importance, trains every pruned layer on 120,000 tokens, writes the pruned model and evaluates
it. The demo then compares importance with keeping the first channels, before any training. Takes two minutes on one
core, without a download: the teacher is in examples/byte_teacher (tools/byte_teacher.py has trained it), and the data
are modules of Python's standard library. Those that losses are measured on are part of no training data.
"""

import json
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from rich.console import Console

from outsize.config.read import read_config
from outsize.methods.bypass.score import Scores
from outsize.run.prune import prune_run
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_model import PrunedModel
from outsize.run.prune_scores import Pick, Scoring, Variants
from outsize.run.prune_setup import PruneSetup, set_up

TEACHER = Path(__file__).parent / "byte_teacher"
TOKENS = 128
"""Of a row."""
WIDTHS, WIDTH, HEADS = (288, 192, 96), 96, 2
"""The teacher has 384 channels and 8 KV heads."""
_SMALL = 8000
"""Bytes of the largest held-out module that losses are measured on: about 20,000 in all."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    model: PrunedModel
    by_width: dict[int, tuple[Scores, Scores]]
    """Feed-forward width: untrained, with the channels that importance keeps, and with the first ones."""

    @property
    def recovered(self) -> float:
        """Share of the loss that pruning costs."""
        teacher, pruned, trained = (each.loss for each in (self.model.teacher, self.model.pruned, self.model.trained))
        return (pruned - trained) / (pruned - teacher)


def texts(*, held_out: bool = False) -> list[str]:
    """Modules of the standard library, in the order of their names. Every eighth is held out."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [path for number, path in enumerate(paths) if (number % 8 == 0) == held_out]
    return [path.read_text(encoding="utf-8", errors="replace") for path in chosen]


def write_run(folder: Path, teacher: Path = TEACHER, prune: dict[str, Any] | None = None, **keys: Any) -> Path:
    """The run file and its data. `prune`, `keys`: other keys than the demo's."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"train": texts(), "held_out": [text for text in texts(held_out=True) if len(text) <= _SMALL]}
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    run: dict[str, Any] = {
        "base_model": str(teacher),
        "datasets": [{"path": str(folder / "train.jsonl"), "type": "completion"}],
        "test_datasets": [{"path": str(folder / "held_out.jsonl"), "type": "completion"}],
        "sequence_len": TOKENS,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1.2e-2,  # the best for this model and budget (benchmarks/results/prune-cpu-2026-11-19.md)
        "eval_steps": 0.5,
        "bf16": False,
        "device": "cpu",
        "output_dir": str(folder / "pruned"),
        "prune": {
            "tokens": "120k",
            "importance_tokens": "32k",
            "score_tokens": "32k",
            "intermediate_size": [WIDTH],
            "num_key_value_heads": [HEADS],
            "shape": "uniform",
            "target": {"params": 0.4},  # only both variants in all layers are below it
        },
    }
    run = {**run, **keys, "prune": {**run["prune"], **(prune or {})}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def main(
    folder: Path, *, teacher: Path = TEACHER, prune: dict[str, Any] | None = None, console: Console | None = None
) -> Outcome:
    console, started = console or Console(width=None if sys.stdout.isatty() else 104), time.perf_counter()
    run = write_run(folder, teacher, prune)
    (model,) = prune_run(read_config(run), console).models
    setup = set_up(read_config(run))
    outcome = Outcome(model=model, by_width=by_width(setup, folder / "pruned"))
    setup.teacher.close()
    losses = f"{model.teacher.loss:.4f}, pruned {model.pruned.loss:.4f}, trained {model.trained.loss:.4f}"
    lines = [f"teacher {losses}: training recovers {outcome.recovered:.0%} of the loss"]
    lines += [
        f"feed-forward width {width} of 384, untrained: by importance {important.loss:.4f}, first channels "
        f"{first.loss:.4f}"
        for width, (important, first) in outcome.by_width.items()
    ]
    for line in [*lines, f"{time.perf_counter() - started:.0f} s"]:
        console.print(line, highlight=False, soft_wrap=True)
    return outcome


def by_width(setup: PruneSetup, folder: Path) -> dict[int, tuple[Scores, Scores]]:
    """Of models with other feed-forward widths and nothing else changed."""
    ffn = next(variant for variant in setup.variants[0] if variant.learn == "ffn")
    picks = {
        width: [
            Pick(layer, replace(ffn, changes=(replace(ffn.changes[0], count=width),)), is_raw=True)
            for layer in setup.variants
        ]
        for width in WIDTHS
    }
    found = []
    for num_calibration in (setup.num_calibration, 0):  # without calibration, the first channels stay
        ranked = replace(setup, num_calibration=num_calibration)
        variants = Variants(ranked, Library(folder), StoredImportance(ranked, folder))
        scoring = Scoring(variants, setup.prune.score_tokens, None)
        found.append(scoring.of({str(width): some for width, some in picks.items()}, lambda done, total: None)[1])
    return {width: (found[0][str(width)], found[1][str(width)]) for width in WIDTHS}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        main(Path(place))
