"""`prune.distill`: a model that was put together is trained end to end, as a run of `outsize train` with a teacher."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from outsize.run.distill_batches import DistillBatches
from outsize.run.prune_hidden import find_hidden, num_distill_batches, num_distill_steps
from outsize.run.prune_setup import PruneSetup
from outsize.run.train import train_run


def distill(setup: PruneSetup, model: Path, console: Console) -> Path | None:
    """Train the model of a folder into a folder beside it, on the first batches of the local training. An earlier run
    is continued; a finished one stays as it is. None: it was interrupted.
    """
    config = setup.config
    assert config.prune is not None and config.prune.distill is not None
    how, result = config.prune.distill, model.with_name(f"{model.name}-distilled")
    if (result / "config.json").exists():
        return result
    hidden, why = find_hidden(setup)
    text = f"runs: {why}" if hidden is None else f"its last hidden states are read from {hidden.folder}"
    console.print(f"teacher  {text}", highlight=False, soft_wrap=True, markup=False)
    run = replace(
        config,
        base_model=str(model),
        teacher_model=config.base_model,
        kd_alpha=how.kd_alpha,
        kd_temperature=how.kd_temperature,
        learning_rate=how.learning_rate,
        max_steps=num_distill_steps(config),
        train_sampling_strategy="sequential",  # the rows are in the order of the batches
        output_dir=str(result),
        prune=None,
        auto_resume_from_checkpoints=True,
        notes=(),
    )
    batches = DistillBatches(order=setup.train.order, num_batches=num_distill_batches(config), hidden=hidden)
    return train_run(run, console, batches).result
