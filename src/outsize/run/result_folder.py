"""Folders that a run wrote: checkpoints and results, with a whole model or an adapter. `outsize export` and `outsize
chat` read them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from outsize.base.errors import BadFile, ConfigError, OutsizeError
from outsize.base.units import show_bytes
from outsize.checkpoint.folder import MANIFEST, NAME_ONE, is_staged, read_manifest, require_exists
from outsize.hardware.host import free_host_bytes
from outsize.integrations.plain import NOTE, OPTIMIZER, SCHEDULER
from outsize.model.build import load_config, trainable_class
from outsize.run.compat_checks import first_line

OURS = {
    MANIFEST, "state.safetensors", "rng.json", "rng.safetensors", "scheduler.json", "trainer_state.json", "run.json",
    "training_args.json", OPTIMIZER, SCHEDULER, NOTE,
}  # fmt: skip
"""Files of a checkpoint that are not part of the model."""
_ADAPTER = "adapter_config.json"
_NAME_BASE = "Name its folder with --base."


def require_folder(folder: Path) -> bool:
    """Raise unless the folder has a complete model or adapter. Returns whether it is an adapter."""
    require_exists(folder)
    if (folder / MANIFEST).exists() or is_staged(folder):
        read_manifest(folder)
    is_adapter = (folder / _ADAPTER).exists()
    if not is_adapter and not (folder / "config.json").exists():
        raise BadFile(f"{folder}: neither config.json nor an adapter. {NAME_ONE}")
    if not any(path.suffix == ".safetensors" and path.name not in OURS for path in folder.iterdir()):
        raise BadFile(f"{folder}: no weights (.safetensors). {NAME_ONE}")
    return is_adapter


def load_model(folder: Path) -> Any:
    """A whole model in host memory, in the dtype of its files."""
    config = load_config(folder)
    return _load(config, str(folder), BadFile, "Use another checkpoint, or the folder that the model was saved to.")


def base_of(folder: Path, given: str | None = None) -> str:
    """The base of an adapter: the given one, or the one that it names. Raises if there is no such model."""
    path = folder / _ADAPTER
    try:
        base = given or json.loads(path.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read ({error}). Use another checkpoint.") from None
    if not base:
        raise ConfigError(f"{path}: does not name the adapter's base. Name it with --base.")
    try:
        load_config(base)
    except OutsizeError as error:
        reason = str(error).partition(". ")[0]
        raise ConfigError(f"{folder}: the adapter's base cannot be loaded ({reason}). {_NAME_BASE}") from None
    return str(base)


def load_adapted(folder: Path, base: str, *, fp32: bool = False) -> Any:
    """A PEFT model in host memory: the adapter on its base. `fp32`: PEFT's default, which casts bf16 adapters."""
    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigError(f"{folder}: an adapter needs peft, which is not installed. Run: pip install peft") from None
    model = _load(load_config(base), base, ConfigError, _NAME_BASE)
    try:
        return PeftModel.from_pretrained(model, str(folder), torch_device="cpu", autocast_adapter_dtype=fp32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{base}: the adapter does not fit this model ({first_line(error)}). Name the model it was trained on with "
            "--base."
        ) from None


def _load(config: Any, source: str, kind: type[OutsizeError], advice: str) -> torch.nn.Module:
    _require_memory(Path(source))
    model_class = trainable_class(config)
    try:
        model, found = model_class.from_pretrained(source, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise kind(f"{source}: its weights cannot be loaded ({first_line(error)}). {advice}") from None
    if missing := sorted(map(str, (*found["missing_keys"], *found["mismatched_keys"]))):
        raise kind(f"{source}: {missing[0]} is missing or of another shape in its weights. {advice}")
    loaded: torch.nn.Module = model.eval().requires_grad_(False)
    return loaded


def _require_memory(folder: Path) -> None:
    needed = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.name not in OURS)
    if needed > (free := free_host_bytes()):
        raise ConfigError(
            f"{folder}: its weights take {show_bytes(needed)}, but {show_bytes(free)} of host memory is free. Free "
            "some, or use a machine with more."
        )
