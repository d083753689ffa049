"""`outsize export`: writes a checkpoint as a plain Hugging Face folder, optionally with the adapter merged."""

import json
import shutil
from pathlib import Path

import torch

from outsize.base.errors import BadFile, ConfigError
from outsize.checkpoint.folder import MANIFEST, StagedDir, os_errors_as_save_failed, read_manifest
from outsize.checkpoint.model_files import is_weight_file
from outsize.integrations.plain import NOTE, OPTIMIZER, SCHEDULER
from outsize.model.build import trainable_class
from outsize.run.compat_checks import first_line

_OURS = {
    MANIFEST, "state.safetensors", "rng.json", "rng.safetensors", "scheduler.json", "trainer_state.json", "run.json",
    "training_args.json", OPTIMIZER, SCHEDULER, NOTE,
}  # fmt: skip
_ADAPTER = "adapter_config.json"
_NAME_ONE = "Name a checkpoint, or the output_dir of a run."


def export_folder(source: Path, target: Path, *, merge: bool = False, base: str | None = None) -> None:
    """Export `source`, a checkpoint or the output folder of a run.

    `merge`: merge the adapter into its base and write a whole model. `base`: the adapter's base, if it has moved.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: there is no such folder. {_NAME_ONE}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        found = "the folder is not empty" if target.is_dir() else "it is a file"
        raise ConfigError(f"{target}: {found}. Name another folder.")
    if (source / MANIFEST).exists():
        read_manifest(source)
    adapted = (source / _ADAPTER).exists()
    if merge and not adapted:
        raise ConfigError(f"--merge: {source} has no adapter ({_ADAPTER}). Remove --merge.")
    if not adapted and not (source / "config.json").exists():
        raise BadFile(f"{source}: neither config.json nor an adapter. {_NAME_ONE}")
    if not any(path.suffix == ".safetensors" and path.name not in _OURS for path in source.iterdir()):
        raise BadFile(f"{source}: no weights (.safetensors). {_NAME_ONE}")
    draft = StagedDir.into(target)
    try:
        with os_errors_as_save_failed(target):
            names = [
                path.name
                for path in source.iterdir()
                if path.is_file() and path.name not in _OURS and not path.name.startswith(".")
            ]
            if merge:
                _merge(source, draft.path, base)
                names = [name for name in names if not name.startswith("adapter_") and name != "README.md"]
            for name in names:
                shutil.copyfile(source / name, draft.path / name)
        draft.commit_files(is_weight_file)
    except BaseException:
        draft.discard()
        raise


def _merge(adapter: Path, into: Path, base: str | None) -> None:
    """Merge with PEFT, in host memory."""
    from peft import PeftModel
    from transformers import AutoConfig

    base = base or _base_of(adapter / _ADAPTER)
    try:
        model = trainable_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base}: the adapter's base cannot be loaded ({first_line(error)}). Name its folder with --base."
        ) from None
    try:
        with torch.no_grad():
            merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{base}: the adapter does not fit this model ({first_line(error)}). Name the model it was trained on with "
            "--base."
        ) from None
    merged.save_pretrained(into)


def _base_of(path: Path) -> str:
    try:
        base = json.loads(path.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read ({error}). Use another checkpoint.") from None
    if not base:
        raise ConfigError(f"{path}: does not name the adapter's base. Name it with --base.")
    return str(base)
