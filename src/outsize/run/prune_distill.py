"""`prune.distill`: a model that was put together is trained end to end, as a run of `outsize train` with a teacher."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from outsize.config.run import RunConfig
from outsize.run.train import train_run


def distill(config: RunConfig, model: Path, console: Console) -> Path | None:
    """Train the model of a folder into a folder beside it. An earlier run is continued; a finished one stays as it is.
    None: it was interrupted.
    """
    assert config.prune is not None and config.prune.distill is not None
    how, result = config.prune.distill, model.with_name(f"{model.name}-distilled")
    if (result / "config.json").exists():
        return result
    rows = config.batch_size or (config.micro_batch_size or 1) * (config.gradient_accumulation_steps or 1)
    run = replace(
        config,
        base_model=str(model),
        teacher_model=config.base_model,
        kd_alpha=how.kd_alpha,
        kd_temperature=how.kd_temperature,
        learning_rate=how.learning_rate,
        max_steps=max(1, how.tokens // (rows * config.sequence_len)),
        output_dir=str(result),
        prune=None,
        auto_resume_from_checkpoints=True,
        notes=(),
    )
    return train_run(run, console).result
