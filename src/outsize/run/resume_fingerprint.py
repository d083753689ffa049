"""The settings and data that a run's bits depend on. Every checkpoint stores them; a resumed run is compared with them.

There are three kinds of settings. Memory, saving and logging may change freely. The learning rate, its schedule, the
length of the run and similar settings affect only later steps: `--set` changes them on resume. Data, seed, model,
adapter and precision determined the steps so far and must stay.

Data is compared by content, not by path: by a fingerprint of each dataset's tokens and labels in order (see
`Rows.fingerprint`). So a file may move, and a changed row, tokenizer or chat template is noticed.
"""

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outsize.base.errors import BadFile, ConfigError
from outsize.base.log import log
from outsize.checkpoint.folder import checkpoints, newest
from outsize.config.run import RunConfig
from outsize.model.build import local_folder
from outsize.run.content_hash import model_hash
from outsize.setup.micro_batch import Split

FINGERPRINT_FILE = "run.json"
DATA = "data"
"""The key of the fingerprints, one per dataset."""
_BASE = "base"
"""The key of an adapter's base: its folder, and the hash of its files. Earlier versions had none."""
_RUN_ID = "run_id"
"""The key of the id that a run's folder and checkpoints share. A resumed run keeps it."""
_THREADS = "cpu_threads"
"""The key of the number of threads, of runs on the CPU."""
_FREE = {
    "output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "eval_strategy", "eval_steps",
    "eval_batch_size", "test_datasets", "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience",
    "logging_steps", "report_to", "dataloader_num_workers", "gpu_memory", "host_memory", "device", "plan_file",
    "pins", "activation_offloading", "resume_from_checkpoint", "auto_resume_from_checkpoints", "chunk_bytes", "notes",
    "overridden", "base_model", "reinit_weights", "batch_size", "environment", "hub_model_id", "run_name",
    "replaced_optimizer", "lora_model_dir", "tokenizer_config", "special_tokens", "tokens", "chat_template", "prune",
}  # fmt: skip
"""`base_model`: the weights come from the checkpoint and are compared tensor by tensor; the folder may have moved.
`batch_size`: see `_SPLIT`. What a tokenizer depends on is in the fingerprints of the data.
"""
_SPLIT = ("micro_batch_size", "gradient_accumulation_steps")
_TOGETHER = ((*_SPLIT, "batch_size"), ("num_epochs", "max_steps"), ("warmup_steps", "warmup_ratio"))
"""Settings that express one thing: changing one with `--set` changes the others too."""
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_ON_REQUEST = {
    "micro_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "learning_rate", "lr_scheduler",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "nonfinite", "chunked_loss", "tile_tokens", "attn_implementation", "sdp_kernel",
    "full_determinism", "tf32", *_LORA_KERNELS,
}  # fmt: skip


def resume_fingerprint(
    config: RunConfig,
    fingerprints: Sequence[str],
    cpu_threads: int | None,
    checkpoint: Path | None,
    base: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What a checkpoint stores of a config with a chosen micro-batch. `fingerprints`: of its datasets. `cpu_threads`:
    None on a GPU. `checkpoint`: that the run resumes from. `base`: of an adapter (`base_record`).
    """
    run = (_read(checkpoint).get(_RUN_ID) if checkpoint is not None else None) or uuid.uuid4().hex
    return {**_settings(config), DATA: list(fingerprints), _THREADS: cpu_threads, _RUN_ID: run, _BASE: base}


def newest_of_run(folder: Path) -> tuple[Path | None, Path | None]:
    """The newest complete checkpoint of the last run in `output_dir`, and that of an earlier run with more steps."""
    newest(folder)  # finishes what killed processes left
    found = [path for _, path in checkpoints(folder)]
    run = _run_in(folder)
    own = [path for path in found if run is None or _run_in(path) == run]
    last = own[-1] if own else None
    return last, found[-1] if found and found[-1] != last else None


def _run_in(folder: Path) -> str | None:
    run: str | None = _read(folder).get(_RUN_ID) if (folder / FINGERPRINT_FILE).exists() else None
    return run


def write_fingerprint(folder: Path, fingerprint: dict[str, Any]) -> None:
    draft = folder / f".{FINGERPRINT_FILE}"
    draft.write_text(json.dumps(fingerprint, indent=1))
    draft.replace(folder / FINGERPRINT_FILE)


def threads_in(checkpoint: Path) -> int | None:
    """The number of CPU threads of the checkpoint's steps. None if they ran on a GPU or it is unknown."""
    number: int | None = _read(checkpoint).get(_THREADS)
    return number


def _settings(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in json.loads(json.dumps(asdict(config))).items() if name not in _FREE}


def split_of(checkpoint: Path, splits: Sequence[Split]) -> Split:
    """The checkpoint's split, if the config allows it."""
    theirs = _split_in(_read(checkpoint))
    if len(splits) > 1 and theirs not in splits:
        raise _refused(checkpoint, [_another_batch(theirs, splits[0], f"{splits[0].rows * splits[0].passes}")])
    return theirs if theirs in splits else splits[0]


def require_resumable(checkpoint: Path, config: RunConfig) -> list[str]:
    """Compare a config with a chosen micro-batch with the checkpoint's. Returns and logs the settings that were changed
    with `--set`.
    """
    then, now = _read(checkpoint), _settings(config)
    if config.adapter == "lora":
        then = dict.fromkeys(_LORA_KERNELS, False) | then  # checkpoints of earlier versions do not have them
    theirs, mine = _split_in(then), Split(rows=now["micro_batch_size"], passes=now["gradient_accumulation_steps"])
    keeps_batch = theirs.rows * theirs.passes == mine.rows * mine.passes
    problems = [] if keeps_batch else [_another_batch(theirs, mine, f"{mine.rows * mine.passes} ({mine})")]
    changed = []
    # Reported elsewhere: data by its content once it is read, the split above.
    reported = {DATA, _THREADS, _RUN_ID, _BASE, "datasets", "chat_template_jinja"} | (
        set() if keeps_batch else set(_SPLIT)
    )
    for name in sorted(then.keys() - reported):
        if then[name] == now.get(name):
            continue
        if name in _ON_REQUEST and _is_confirmed(name, config.overridden):
            changed.append(name)
        else:
            problems.append(_problem(name, then[name], now.get(name), name in config.overridden))
    if problems:
        raise _refused(checkpoint, problems)
    for name in changed:
        log.warning("resuming with a changed setting: %s: %s → %s", name, _show(then[name]), _show(now[name]))
    return changed


def require_same_data(checkpoint: Path, config: RunConfig, fingerprints: Sequence[str]) -> None:
    """Compare the content of the datasets with the checkpoint's."""
    then = _read(checkpoint)
    paths = [dataset.path for dataset in config.datasets]
    if then[DATA] == list(fingerprints):
        for was, now in zip(then.get("datasets", []), paths, strict=False):
            if not _is_same_path(was["path"], now):
                log.info("the data of %s is now %s, with the same content", was["path"], now)
        return
    if len(then[DATA]) != len(fingerprints):
        found = [f"datasets: there were {len(then[DATA])}, now there are {len(fingerprints)}."]
    elif sorted(then[DATA]) == sorted(fingerprints):
        found = ["datasets: the order has changed."]
    else:
        other = [path for path, was, now in zip(paths, then[DATA], fingerprints, strict=True) if was != now]
        found = [
            f"datasets: the content of {path} has changed since the run began (rows, images, order, tokenizer or "
            "chat template)."
            for path in other
        ]
    raise _refused(checkpoint, [f"{text} Restore it." for text in found])


def base_record(config: RunConfig, checkpoint: Path | None) -> dict[str, str] | None:
    """What a checkpoint says of an adapter's base, of which it has no copy: the folder, which may move, and the hash of
    its files. Compared with that of the checkpoint to resume from. None: there is no base, or its weights are drawn.
    """
    if config.adapter != "lora" or config.reinit_weights:
        return None
    folder = local_folder(config.base_model)
    base = {"folder": str(folder.resolve()), "hash": model_hash(folder)}
    then = _read(checkpoint).get(_BASE) if checkpoint is not None else None
    if checkpoint is None or then is None:
        return base
    moved = then["folder"] != base["folder"]
    if then["hash"] != base["hash"]:
        was = f"it was {then['folder']}" if moved else "its files have changed"
        found = f"base_model: the steps so far used another model than {base['folder']} ({was}). Name that model."
        raise _refused(checkpoint, [found])
    if moved:
        log.info("the base of %s is now %s, with the same content", then["folder"], base["folder"])
    return base


def _split_in(then: dict[str, Any]) -> Split:
    return Split(rows=then["micro_batch_size"], passes=then["gradient_accumulation_steps"])


def _is_confirmed(name: str, overridden: Sequence[str]) -> bool:
    return any(name in group and not set(group).isdisjoint(overridden) for group in ((name,), *_TOGETHER))


def _another_batch(then: Split, now: Split, shown: str) -> str:
    batch = then.rows * then.passes
    return (
        f"batch_size was {batch} ({then}) and is {shown}. A resumed run keeps its global batch, which defines its "
        f"position in the data: choose micro_batch_size × gradient_accumulation_steps = {batch}."
    )


def _problem(name: str, then: Any, now: Any, is_overridden: bool) -> str:
    found = f"{name} was {_show(then)} and is {_show(now)}."
    if name in _ON_REQUEST:
        both = " and ".join(f"--set {key}=…" for key in _SPLIT) if name in _SPLIT else f"--set {name}={_show(now)}"
        return f"{found} Set it back, or confirm the change with {both}."
    unless = "--set cannot change it on resume" if is_overridden else "It cannot be changed on resume"
    return f"{found} {unless}, because the steps so far used it: set it back."


def _is_same_path(one: str, other: str) -> bool:
    """`./chat.jsonl` is `chat.jsonl`."""
    return one == other or os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refused(checkpoint: Path, problems: Sequence[str]) -> ConfigError:
    new = f"To start a new run from these weights: base_model: {checkpoint}, another output_dir and no --resume."
    if (checkpoint / "adapter_config.json").exists():
        new = (
            f"To start a new run from this adapter, with its rank: lora_model_dir: {checkpoint}, another output_dir "
            f"and no --resume. For another rank, merge it first (outsize export {checkpoint} merged --merge) and use "
            "base_model: merged."
        )
    return ConfigError("\n  ".join([f"{checkpoint}: cannot be resumed with these settings.", *problems, new]))


def _read(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / FINGERPRINT_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read ({error}). Name a checkpoint that `outsize train` wrote.") from None
