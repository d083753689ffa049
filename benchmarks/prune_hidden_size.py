"""Quality of models with fewer residual channels, with the small teacher of examples/byte_teacher, on a CPU:

    OMP_NUM_THREADS=1 python -m benchmarks.prune_hidden_size

For each hidden size: the cut model without training, by ranked and by other channels; all sub-blocks trained locally;
then trained end to end with the teacher. Losses are on held-out rows. Prints a table in Markdown.
"""

import io
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from torch import Tensor

from examples.prune import write_run
from outsize.config.read import read_config
from outsize.methods.bypass.hidden_size import Channels
from outsize.methods.bypass.score import Scores
from outsize.run.prune import prune_run
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_reduced import Reduced
from outsize.run.prune_scores import Pick, Scoring, Variants, base_picks
from outsize.run.prune_setup import set_up

SIZES, SEEDS = (96, 64), 4
PRUNE = {
    "tokens": "60k",
    "intermediate_size": [],
    "num_key_value_heads": [],
    "target": {"params": 0.95},
    "distill": {"tokens": "60k", "learning_rate": 3e-3},
}


def measure(folder: Path, size: int) -> list[tuple[str, float, float]]:
    """Rows of the table: name, loss, KL."""
    run = read_config(write_run(folder, prune={**PRUNE, "hidden_size": size}, learning_rate=3e-3))
    (model,) = prune_run(run, Console(file=io.StringIO())).models
    assert model.final is not None
    setup = set_up(run)
    importance = StoredImportance(setup, folder / "pruned")
    importance.rank()
    assert setup.reduced is not None
    statistics, ranked = importance.of_norms(), setup.reduced.required_channels
    width = setup.reduced.reduction.size

    def cut(channels: Channels) -> Scores:
        """Of the model without training."""
        reduced = Reduced(setup.teacher, setup.stack, setup.parts, size, setup.device)
        reduced.channels = channels
        found = replace(setup, reduced=reduced)
        picks: list[Pick] = [replace(pick, is_raw=True) for pick in base_picks(found)]
        variants = Variants(found.of_reduced(), Library(folder / "pruned"), importance)
        _, scores = Scoring(variants, setup.prune.score_tokens, None).of({"cut": picks}, lambda done, total: None)
        return scores["cut"]

    def of(keep: Tensor) -> Scores:
        return cut(Channels.given(statistics, keep))

    rows = {
        "ranked channels": model.pruned,
        "the same, norms not rescaled": cut(Channels(ranked.keep, dict.fromkeys(ranked.scales, 1.0))),
        "first channels": of(torch.arange(size)),
    }
    randoms = [
        of(torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:size].sort().values)
        for seed in range(SEEDS)
    ]
    setup.teacher.close()
    trained = {"ranked, trained locally": model.trained, "and distilled": model.final}
    chance = (f"random channels, mean of {SEEDS}", mean(one.loss for one in randoms), mean(one.kl for one in randoms))
    before, after = ([(name, one.loss, one.kl) for name, one in each.items()] for each in (rows, trained))
    return [("teacher", model.teacher.loss, 0.0), *before, chance, *after]


def main() -> None:
    torch.set_num_threads(1)
    print("| hidden size | model | loss | KL |\n|---|---|---|---|")
    for size in SIZES:
        started = time.perf_counter()
        with TemporaryDirectory() as place:
            for name, loss, kl in measure(Path(place), size):
                print(f"| {size} | {name} | {loss:.4f} | {kl:.4f} |")
        print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
