"""`outsize export`: the result of a run as a plain Hugging Face folder, out of a checkpoint, with or without merging an
adapter into its base.
"""

import json
import shutil
from pathlib import Path

import torch

from outsize.base.errors import BadFile, ConfigError, tell
from outsize.checkpoint.folder import MANIFEST, StagedDir, os_errors_as_save_failed, read_manifest
from outsize.checkpoint.model_files import is_weight_file
from outsize.model.build import trainable_class
from outsize.run.compat_checks import first_line

_OURS = {
    MANIFEST,
    "state.safetensors",
    "rng.json",
    "rng.safetensors",
    "scheduler.json",
    "trainer_state.json",
    "run.json",
    "training_args.json",
}
_OURS |= {"optimizer.pt", "scheduler.pt", "outsize-checkpoint.md"}  # see integrations/plain.py
_ADAPTER = "adapter_config.json"


def export_folder(source: Path, target: Path, *, merge: bool = False, base: str | None = None) -> None:
    """Args:
    source: a checkpoint, or a folder that a run has exported.
    merge: of an adapter: add it to its base, and write a whole model.
    base: the adapter's base, if it is not where the adapter says.
    """
    if not source.is_dir():
        raise ConfigError(
            tell(f"{source} is a folder", "it is not there", "Name a checkpoint, or the output_dir of a run")
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        found = "it holds files" if target.is_dir() else "it is a file"
        raise ConfigError(tell(f"{target} is an empty folder or not there yet", found, "Name another folder"))
    if (source / MANIFEST).exists():
        read_manifest(source)
    adapted = (source / _ADAPTER).exists()
    if merge and not adapted:
        raise ConfigError(tell(f"--merge is for an adapter ({_ADAPTER})", f"{source} has none", "Leave --merge out"))
    if not adapted and not (source / "config.json").exists():
        raise BadFile(
            tell(
                f"{source} has a model",
                "there is neither config.json nor an adapter",
                "Name a checkpoint, or the output_dir of a run",
            )
        )
    if not any(path.suffix == ".safetensors" and path.name not in _OURS for path in source.iterdir()):
        raise BadFile(
            tell(
                f"{source} has weights (.safetensors)",
                "there are none",
                "Name a checkpoint, or the output_dir of a run",
            )
        )
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
    """By PEFT's own arithmetic, in host memory."""
    from peft import PeftModel
    from transformers import AutoConfig

    base = base or _base_of(adapter / _ADAPTER)
    try:
        model = trainable_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(
            tell(
                f"{base} is the adapter's base",
                f"transformers says: {first_line(error)}",
                "Name its folder with --base",
            )
        ) from None
    try:
        with torch.no_grad():
            merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError) as error:
        do = "Name the folder of the model that it was trained on with --base"
        raise ConfigError(tell(f"the adapter fits {base}", f"PEFT says: {first_line(error)}", do)) from None
    merged.save_pretrained(into)


def _base_of(path: Path) -> str:
    try:
        base = json.loads(path.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise BadFile(
            tell(f"{path} describes an adapter", f"it cannot be read ({error})", "Use another checkpoint")
        ) from None
    if not base:
        raise ConfigError(tell("the adapter says which model it belongs to", "it does not", "Name it with --base"))
    return str(base)
