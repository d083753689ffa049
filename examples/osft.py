"""`make osft-demo`: how much of an old task full fine-tuning and OSFT forget, at equal loss on a new task.

A small Llama learns to translate sequences of symbols with one dictionary, then with a second one that shares half of
the entries. The first token names the dictionary, so one model can know both. Each method trains at several learning
rates until the new task's loss is LEVEL; what counts is the old task's loss at that point. After an equal number of
steps, a low learning rate would look like remembering. docs/osft_demo.md has the results.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from examples.osft_picture import Series, picture
from outsize.progress import Bar
from outsize.reference import AdamW as Reference

PICTURE = Path("outsize-demo/osft.svg")
LEVEL = 0.5
"""The loss on the new task at which methods are compared."""
SYMBOLS, LENGTH, SHARED = 24, 6, 0.5
"""Symbols of the language, their number in one sequence, the share of entries in which the two dictionaries agree."""
OLD, NEW = 0, 1
"""The tasks."""


@dataclass(frozen=True)
class Method:
    name: str
    osft: outsize.OSFT | None = None
    """None: full fine-tuning."""


METHODS = (
    Method("full fine-tuning"),
    Method("OSFT u = 0.5", outsize.OSFT(unfreeze_rank_ratio=0.5)),
    Method("OSFT u = 0.25", outsize.OSFT(unfreeze_rank_ratio=0.25)),
    Method("linear weights alone", outsize.OSFT(unfreeze_rank_ratio=1.0, others="freeze")),
    Method("OSFT u = 0.5, others frozen", outsize.OSFT(unfreeze_rank_ratio=0.5, others="freeze")),
    Method("OSFT u = 0.25, others frozen", outsize.OSFT(unfreeze_rank_ratio=0.25, others="freeze")),
)
"""u is `unfreeze_rank_ratio`. The last three freeze embeddings, norms and the head. `linear weights alone` trains all
directions of the weights that OSFT splits: without it, the effect of freezing the others would be taken for OSFT's.
"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    seeds: int = 3
    """Of the dictionaries, the initial weights and the batches."""
    old_steps: int = 400
    max_steps: int = 300
    """On the new task. A learning rate that does not reach LEVEL within them is out."""
    rates: tuple[float, ...] = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
    """Decreasing. A method ends at the first that is out: those below are slower still."""
    rows: int = 32
    every: int = 3
    """Steps between two evaluations."""
    repeated_steps: int = 30
    """Of a method's best run, which are repeated with `outsize.prepare`."""


@dataclass(frozen=True)
class Point:
    step: float
    new: float
    """Loss on the new task."""
    old: float


@dataclass(frozen=True)
class Run:
    """A method that trains a model on the new task, at one learning rate."""

    method: str
    rate: float
    seed: int
    path: list[Point]
    """Evaluations, the first before the first step. The last is the first at or below LEVEL, unless the steps ran out.
    """

    @property
    def at_level(self) -> Point | None:
        """Where the loss on the new task is LEVEL, between the last two evaluations. None: it was not reached."""
        *_, before, after = [self.path[0], *self.path]
        if after.new > LEVEL:
            return None
        part = (before.new - LEVEL) / (before.new - after.new) if before.new > after.new else 1.0
        return Point(
            before.step + part * (after.step - before.step), LEVEL, before.old + part * (after.old - before.old)
        )


@dataclass(frozen=True)
class Outcome:
    runs: list[Run]
    repeated: dict[str, bool]
    """By method: whether its best run of the first seed begins with the same losses, to the bit, with
    `outsize.prepare`.
    """

    def reached(self, method: str) -> dict[float, list[Run]]:
        """The runs at each learning rate with which all seeds reached LEVEL."""
        runs = [run for run in self.runs if run.method == method]
        by_rate = {rate: [run for run in runs if run.rate == rate] for rate in dict.fromkeys(run.rate for run in runs)}
        return {rate: of for rate, of in by_rate.items() if all(run.at_level for run in of)}

    def best(self, method: str) -> list[Run]:
        """The runs at the learning rate that forgot least, on average over the seeds. Empty if none reached LEVEL."""
        return min(self.reached(method).values(), key=lambda runs: statistics.mean(forgotten(runs)), default=[])


def forgotten(runs: Sequence[Run]) -> list[float]:
    """The loss on the old task at LEVEL, of each run."""
    return [run.at_level.old for run in runs if run.at_level]


def steps_needed(runs: Sequence[Run]) -> float:
    """Steps to LEVEL, on average."""
    return statistics.mean(run.at_level.step for run in runs if run.at_level)


class Dictionaries:
    """Two tasks: `task x1 ... xn = y1 ... yn`, where y translates x with the task's dictionary. The loss is on y."""

    def __init__(self, seed: int):
        rng = torch.Generator().manual_seed(seed)
        old = torch.randperm(SYMBOLS, generator=rng)
        changed = torch.randperm(SYMBOLS, generator=rng)[: round(SYMBOLS * (1 - SHARED))]
        new = old.clone()
        new[changed] = old[changed.roll(1)]
        self.entries = torch.stack([old, new])

    def batch(self, tasks: Sequence[int], rows: int, rng: torch.Generator) -> dict[str, Any]:
        """`rows` sequences of each task."""
        task = torch.tensor(tasks).repeat_interleave(rows)[:, None]
        x = torch.randint(SYMBOLS, (len(task), LENGTH), generator=rng)
        ids = torch.cat([SYMBOLS + 1 + task, x, torch.full_like(task, SYMBOLS), self.entries[task, x]], 1)
        labels = ids.clone()
        labels[:, : LENGTH + 2] = -100
        return {"input_ids": ids, "labels": labels, "use_cache": False}


def main(
    scale: Scale | None = None,
    *,
    to: Path = PICTURE,
    methods: Sequence[Method] = METHODS,
    console: Console | None = None,
) -> Outcome:
    scale, console = scale or Scale(), console or Console(width=None if sys.stdout.isatty() else 104)
    started = time.perf_counter()
    # Sums depend on the number of threads. For operators this small, one thread is also the fastest.
    torch.set_num_threads(1)
    with Bar("training") as bar:
        outcome = compare(scale, methods, bar)
    for table in tables(outcome, methods):
        console.print(table)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(picture(list(series(outcome, methods)), LEVEL))
    same = "the same losses to the bit" if all(outcome.repeated.values()) else "[red]different losses[/red]"
    console.print(
        f"The first {scale.repeated_steps} steps of the best runs, repeated with outsize.prepare: {same}.",
        highlight=False,
    )
    console.print(f"{to}; {time.perf_counter() - started:.0f} s in all.", highlight=False)
    return outcome


def compare(scale: Scale, methods: Sequence[Method], bar: Bar) -> Outcome:
    """All runs, in a plain loop; then the first steps of each method's best run with the engine."""
    starts = [learn_old(seed, scale, bar) for seed in range(scale.seeds)]
    runs: list[Run] = []
    for method in methods:
        for rate in scale.rates:
            # The other seeds are left out once one has not reached LEVEL.
            for seed, weights in enumerate(starts):
                runs.append(Run(method.name, rate, seed, learn_new(method, rate, seed, weights, scale, bar)))
                if runs[-1].at_level is None:
                    break
            if runs[-1].at_level is None:
                break
    outcome = Outcome(runs, {})
    for method in methods:
        for run in outcome.best(method.name)[:1]:
            few = replace(scale, max_steps=scale.repeated_steps)
            path = learn_new(method, run.rate, run.seed, starts[run.seed], few, bar, prepared=True)
            outcome.repeated[method.name] = path == run.path[: len(path)]
    return outcome


def new_model(seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama_config()).train()


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=SYMBOLS + 3,
        max_position_embeddings=2 * LENGTH + 2,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def learn_old(seed: int, scale: Scale, bar: Bar) -> dict[str, Tensor]:
    """Train a new model on the old task and return its weights."""
    model, tasks, rng = new_model(seed), Dictionaries(seed), torch.Generator().manual_seed(100 + seed)
    optimizer = Reference(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=1.0)
    for step in range(scale.old_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - step / scale.old_steps)
        train_step(model, optimizer, tasks.batch([OLD], scale.rows, rng))
        bar.advance()
    return {name: value.clone() for name, value in model.state_dict().items()}


def learn_new(
    method: Method,
    rate: float,
    seed: int,
    weights: Mapping[str, Tensor],
    scale: Scale,
    bar: Bar,
    prepared: bool = False,
) -> list[Point]:
    """Train on the new task until its loss is LEVEL. `prepared`: with outsize.prepare, else in a plain loop."""
    model, tasks = new_model(seed), Dictionaries(seed)
    model.load_state_dict(weights)
    rng = torch.Generator().manual_seed(200 + seed)
    held_out = tasks.batch([NEW, OLD], 2 * scale.rows, torch.Generator().manual_seed(300 + seed))
    optimizer = make_optimizer(model, method, rate, held_out if prepared else None)
    path = [Point(0, *evaluate(model, held_out))]
    for step in range(1, scale.max_steps + 1):
        train_step(model, optimizer, tasks.batch([NEW], scale.rows, rng))
        bar.advance()
        if step % scale.every == 0:
            path.append(Point(step, *evaluate(model, held_out)))
            if path[-1].new <= LEVEL:
                break
    return path


def make_optimizer(
    model: LlamaForCausalLM, method: Method, rate: float, batch: dict[str, Any] | None = None
) -> torch.optim.Optimizer:
    """`batch`: the largest one, to train with `outsize.prepare`. None: a plain loop, which starts faster."""
    settings: dict[str, Any] = dict(lr=rate, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0)
    if batch is not None:
        engine = outsize.prepare(
            model, batch, optimizer=outsize.AdamW(**settings), method=method.osft, device="cpu", chunked_loss=False
        )
        return engine.optimizer
    if method.osft is not None:
        return outsize.osft.AdamW(model, method.osft, **settings)
    return Reference(model.parameters(), **settings)


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, batch: dict[str, Any]) -> list[float]:
    """The loss of each half of a batch."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    halves = zip(logits.chunk(2), batch["labels"][:, 1:].chunk(2), strict=True)
    return [cross_entropy(half.flatten(0, 1), labels.flatten()).item() for half, labels in halves]


def tables(outcome: Outcome, methods: Sequence[Method]) -> Iterator[Table]:
    """The best learning rate of each method, then all of them."""
    summary = Table(title=f"At a loss of {LEVEL} on the new task, each method at its best learning rate")
    for column in ("method", "learning rate", "steps", "loss on the old task", "of each seed"):
        summary.add_column(column, justify="left" if column == "method" else "right")
    for method in methods:
        if best := outcome.best(method.name):
            old = forgotten(best)
            each = ", ".join(f"{value:.3f}" for value in old)
            numbers = f"{steps_needed(best):.0f}", f"{statistics.mean(old):.3f}", each
            summary.add_row(method.name, f"{best[0].rate:.0e}", *numbers)
        else:
            summary.add_row(method.name, "-", "not reached", "-", "-")
    yield summary
    found = {method.name: outcome.reached(method.name) for method in methods}
    rates = dict.fromkeys(rate for reached in found.values() for rate in reached)
    table = Table(title="Every learning rate: loss on the old task at that point (steps)")
    table.add_column("method")
    for rate in rates:
        table.add_column(f"{rate:.0e}", justify="right")
    for name, reached in found.items():
        cells = [(forgotten(runs), steps_needed(runs)) if (runs := reached.get(rate)) else None for rate in rates]
        table.add_row(name, *(f"{statistics.mean(cell[0]):.3f} ({cell[1]:.0f})" if cell else "-" for cell in cells))
    yield table


def series(outcome: Outcome, methods: Sequence[Method]) -> Iterator[Series]:
    for method in methods:
        best, reached = outcome.best(method.name), outcome.reached(method.name)
        yield Series(
            method.name,
            path=[(point.new, point.old) for point in best[0].path] if best else [],
            rates=[(rate, steps_needed(runs), statistics.mean(forgotten(runs))) for rate, runs in reached.items()],
            best=best[0].rate if best else None,
        )


if __name__ == "__main__":
    sys.exit(0 if all(main().repeated.values()) else 1)
