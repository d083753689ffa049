"""Quality of pruned models with the small teacher of examples/byte_teacher, on a CPU:

    OMP_NUM_THREADS=1 python -m benchmarks.prune_small choices    # raw and trained, free and uniform
    OMP_NUM_THREADS=1 python -m benchmarks.prune_small rates      # learning rates of local training, two model sizes
    OMP_NUM_THREADS=1 python -m benchmarks.prune_small distill    # with and without local training, three seeds

Choices are made on held-out rows, and all figures are measured on other held-out rows, by transformers alone: it loads
the folders that the pipeline has written. Every command prints a table in Markdown.
"""

import argparse
import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples.prune import TEACHER, TOKENS, texts, write_run
from outsize.config.prune_target import PruneDistill, PruneTarget
from outsize.config.read import read_config
from outsize.config.run import RunConfig
from outsize.methods.bypass.costs import Use
from outsize.run.prune import prune_run
from outsize.run.prune_assemble import Assembly
from outsize.run.prune_choice import Choosing, Chosen
from outsize.run.prune_distill import distill
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_scores import Pick, Scoring, StoredScores, Variants
from outsize.run.prune_setup import PruneSetup, set_up
from tools import byte_teacher

SHARES = (0.85, 0.70, 0.55)
"""Of the parameters of the layers."""
NARROW = 0.48
"""Another share, for free and uniform choices."""
CHOICE_RATE = 3e-3
RATES = (1e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
"""Of local training."""
LOCAL_RATE, DISTILL_RATES, SEEDS = 1.2e-2, (1.5e-3, 3e-3, 6e-3), (0, 1, 2)
LOCAL, DISTILLED = 41_000, 20_000
"""Tokens of local training, and of distillation after it. Distillation alone has their sum."""
_UNEVALUATED: dict[str, Any] = {"test_datasets": [], "eval_steps": None}
"""Keys of runs whose local losses nothing needs."""
_ROWS = 256
"""That the figures are measured on."""


@dataclass(frozen=True)
class Figures:
    loss: float
    kl: float
    """To the teacher."""


def measured_rows() -> Tensor:
    """(rows, tokens), of the held-out modules that examples/prune.py does not use."""
    large = [text for text in texts(held_out=True) if len(text) > 8000]
    flat = torch.frombuffer(bytearray("\0".join(large).encode()), dtype=torch.uint8).long()
    rows = flat[: len(flat) // TOKENS * TOKENS].view(-1, TOKENS)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:_ROWS]]


class Measuring:
    def __init__(self, teacher: Path):
        self._rows = measured_rows()
        self._expected = self._logits(teacher)

    @torch.no_grad()
    def _logits(self, folder: Path) -> Tensor:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
        parts = [model.eval()(input_ids=part, use_cache=False).logits for part in self._rows.split(32)]
        return torch.cat(parts).log_softmax(-1)

    def of(self, folder: Path) -> Figures:
        found = self._logits(folder)
        loss = cross_entropy(found[:, :-1].flatten(0, 1), self._rows[:, 1:].flatten())
        kl = kl_div(found.flatten(0, 1), self._expected.flatten(0, 1), reduction="batchmean", log_target=True)
        return Figures(float(loss), float(kl))


class Models:
    """Models from a finished library."""

    def __init__(self, setup: PruneSetup, measuring: Measuring):
        self._setup, self._measuring, self._folder = setup, measuring, Path(setup.config.output_dir)
        self._variants = Variants(setup, Library(self._folder), StoredImportance(setup, self._folder))
        self._count = 0

    def choosing(self, *, is_raw: bool = False, is_uniform: bool = False, is_scored: bool = True) -> Choosing:
        setup = self._setup
        picks = [Pick(layer, variant, is_raw) for layer, some in setup.variants.items() for variant in some]
        by_name = {pick.name.removesuffix("/raw"): 1.0 for pick in picks}
        if is_scored:
            scoring = Scoring(self._variants, setup.prune.score_tokens, None)
            stored = StoredScores(self._variants, scoring, self._folder)
            _, scores = stored.measure(picks, lambda done, total: None)
            by_name = {name.removesuffix("/raw"): found.kl for name, found in scores.items()}
        shaped = replace(setup, prune=replace(setup.prune, shape="uniform" if is_uniform else "free"))
        return Choosing(shaped, by_name, Use(batch=1, context=TOKENS, decoded=0), timed=False)

    def only(self) -> tuple[Chosen, Choosing]:
        """The one choice that the target of the run file allows."""
        choosing = self.choosing(is_scored=False)
        return choosing.choose(self._setup.prune.target[0]), choosing

    def write(self, chosen: Chosen, choosing: Choosing, *, is_raw: bool = False) -> Path:
        self._count += 1
        place = self._folder / "measured" / str(self._count)
        Assembly(self._variants, chosen.variants, choosing.places).write(place, None, {}, is_raw=is_raw)
        return place

    def measured(self, chosen: Chosen, choosing: Choosing, *, is_raw: bool = False) -> Figures:
        return self._measuring.of(self.write(chosen, choosing, is_raw=is_raw))


def trained(path: Path) -> PruneSetup:
    """Train the library of a run file."""
    config = read_config(path)
    prune_run(replace(config, prune=replace(_prune(config), target=())), _silent())
    return set_up(config)


def _prune(config: RunConfig) -> Any:
    assert config.prune is not None
    return config.prune


def _silent() -> Console:
    return Console(file=io.StringIO())


def choices(folder: Path, teacher: Path = TEACHER, **prune: Any) -> list[str]:
    variants = {"intermediate_size": [288, 192, 96], "num_key_value_heads": [4, 2, 1], "skip": ["attention", "ffn"]}
    setup = trained(write_run(folder, teacher, {**variants, "keep": "latest", **prune}, learning_rate=CHOICE_RATE))
    measuring = Measuring(teacher)
    models = Models(setup, measuring)
    raw, free, uniform = models.choosing(is_raw=True), models.choosing(), models.choosing(is_uniform=True)
    fixed = _outside(setup)
    layers = _numel(setup.stack.model) - fixed
    whole = measuring.of(teacher)
    table = ["| model | layer parameters | loss | KL |", "|---|---|---|---|"]
    table.append(f"| teacher | 1.000 | {whole.loss:.4f} | |")

    def add(what: str, choosing: Choosing, limit: float, *, is_raw: bool = False) -> float:
        chosen = choosing.choose(PruneTarget(params={"max": limit}))
        found, params = models.measured(chosen, choosing, is_raw=is_raw), chosen.predicted["params"]
        table.append(f"| {what} | {(params - fixed) / layers:.3f} | {found.loss:.4f} | {found.kl:.4f} |")
        print(table[-1], flush=True)
        return params

    for share in SHARES:
        limit = fixed + share * layers
        add(f"{share:.2f}: raw variants", raw, limit, is_raw=True)
        add(f"{share:.2f}: trained variants", free, limit)
    for share in (*SHARES, NARROW):
        used = add(f"{share:.2f}: trained, uniform", uniform, fixed + share * layers)
        add(f"{share:.2f}: trained, free, at most the parameters of uniform", free, used)
    return table


def _numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _outside(setup: PruneSetup) -> int:
    inside = sum(_numel(layer.module) for layer in setup.stack.layers)
    return _numel(setup.stack.model) - inside


def quarter(teacher: Path) -> dict[str, Any]:
    """Keys under `prune`: feed-forward width and KV heads of all layers to a quarter, and a target with both."""
    config = LlamaConfig.from_pretrained(teacher)
    width, heads = config.intermediate_size // 4, config.num_key_value_heads // 4
    config.intermediate_size, config.num_key_value_heads = width, heads
    with torch.device("meta"):
        numel = _numel(LlamaForCausalLM(config))
    return {"intermediate_size": [width], "num_key_value_heads": [heads], "target": {"params": numel}}


def rates(folder: Path, **prune: Any) -> list[str]:
    small = folder / "teacher"
    table = ["| teacher | learning rate | loss | KL | of the lost loss recovered |", "|---|---|---|---|---|"]
    for teacher, name in ((TEACHER, "6 layers of 128"), (small, "4 layers of 64")):
        if teacher == small:
            byte_teacher.train(byte_teacher.new_model(hidden=64, layers=4), small, steps=300)
        measuring = Measuring(teacher)
        whole = measuring.of(teacher)
        table.append(f"| {name} | teacher | {whole.loss:.4f} | | |")
        pruned: Figures | None = None
        for rate in RATES:
            place = folder / name / f"{rate:g}"
            keys = {"keep": "latest", **quarter(teacher), **prune}
            setup = trained(write_run(place, teacher, keys, learning_rate=rate, **_UNEVALUATED))
            models = Models(setup, measuring)
            chosen, choosing = models.only()
            if pruned is None:
                pruned = models.measured(chosen, choosing, is_raw=True)
                table.append(f"| {name} | pruned | {pruned.loss:.4f} | {pruned.kl:.4f} | |")
            found = models.measured(chosen, choosing)
            recovered = (pruned.loss - found.loss) / (pruned.loss - whole.loss)
            table.append(f"| {name} | {rate:g} | {found.loss:.4f} | {found.kl:.4f} | {recovered:.1%} |")
            print(table[-1], flush=True)
    return table


def distillation(folder: Path, teacher: Path = TEACHER, **prune: Any) -> list[str]:
    measuring = Measuring(teacher)
    found: dict[tuple[str, float], list[Figures]] = {}
    for seed in SEEDS:
        place = folder / str(seed)
        keys = {"tokens": LOCAL, "keep": "latest", **quarter(teacher), **prune}
        path = write_run(place, teacher, keys, seed=seed, learning_rate=LOCAL_RATE, **_UNEVALUATED)
        setup = trained(path)
        models = Models(setup, measuring)
        chosen, choosing = models.only()
        starts = {
            "local training, then distillation": (models.write(chosen, choosing), DISTILLED),
            "distillation alone": (models.write(chosen, choosing, is_raw=True), LOCAL + DISTILLED),
        }
        for what, (start, tokens) in starts.items():
            for rate in DISTILL_RATES:
                model = place / f"{tokens}-{rate:g}"
                shutil.copytree(start, model)
                how = PruneDistill(tokens=tokens, learning_rate=rate)
                prune_how = replace(setup.prune, distill=how)
                changed = replace(setup, config=replace(setup.config, prune=prune_how), prune=prune_how)
                result = distill(changed, model, _silent())
                assert result is not None
                found.setdefault((what, rate), []).append(measuring.of(result))
                print(f"seed {seed}, {what}, {rate:g}: {found[what, rate][-1]}", flush=True)
    return by_rate(found)


def by_rate(found: dict[tuple[str, float], list[Figures]]) -> list[str]:
    table = ["| training | learning rate | loss of each seed | mean loss | mean KL |", "|---|---|---|---|---|"]
    for (what, rate), each in found.items():
        losses = ", ".join(f"{one.loss:.4f}" for one in each)
        numbers = f"{mean(one.loss for one in each):.4f} | {mean(one.kl for one in each):.4f}"
        table.append(f"| {what} | {rate:g} | {losses} | {numbers} |")
    for what in dict.fromkeys(what for what, _ in found):
        best = [min(losses) for losses in zip(*_losses(found, what), strict=True)]
        table.append(
            f"| {what} | best of each seed | {', '.join(f'{loss:.4f}' for loss in best)} | {mean(best):.4f} | |"
        )
    return table


def _losses(found: dict[tuple[str, float], list[Figures]], what: str) -> Sequence[list[float]]:
    return [[one.loss for one in each] for (name, _), each in found.items() if name == what]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["choices", "rates", "distill"])
    part = {"choices": choices, "rates": rates, "distill": distillation}[parser.parse_args().part]
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        print("\n".join(part(Path(folder))))


if __name__ == "__main__":
    main()
