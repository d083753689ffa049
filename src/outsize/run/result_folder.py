"""Folders that a run wrote: checkpoints and results, with a whole model or an adapter. `outsize export` and `outsize
chat` read them.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from outsize.base.errors import BadFile, ConfigError, OutsizeError
from outsize.base.units import show_bytes
from outsize.checkpoint.folder import MANIFEST, NAME_ONE, is_staged, read_manifest, require_exists
from outsize.hardware.host import free_host_bytes
from outsize.integrations.plain import NOTE, OPTIMIZER, SCHEDULER
from outsize.model.build import build_model, load_config, local_folder, trainable_class, without_quantization
from outsize.model.quantized import quantization_of
from outsize.quant.dequantize import dequantize
from outsize.quant.settings import Quantization
from outsize.run.adapters import materialize
from outsize.run.compat_checks import first_line

BaseForm = Literal["as trained", "unquantized", "dequantized"]
"""What an adapter is put on: the base it was trained on; the base without the quantization of the run; the values that
the quantized weights stand for.
"""
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
        load_config(base, for_adapter=True)
    except OutsizeError as error:
        reason = str(error).partition(". ")[0]
        raise ConfigError(f"{folder}: the adapter's base cannot be loaded ({reason}). {_NAME_BASE}") from None
    return str(base)


def load_adapted(folder: Path, base: str, *, fp32: bool = False, form: BaseForm = "as trained") -> Any:
    """A PEFT model in host memory: the adapter on its base. `fp32`: PEFT's default, which casts bf16 adapters."""
    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigError(f"{folder}: an adapter needs peft, which is not installed. Run: pip install peft") from None
    model = _load_base(folder, base, form)
    try:
        return PeftModel.from_pretrained(model, str(folder), torch_device="cpu", autocast_adapter_dtype=fp32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{base}: the adapter does not fit this model ({first_line(error)}). Name the model it was trained on with "
            "--base."
        ) from None


def _load_base(folder: Path, base: str, form: BaseForm) -> torch.nn.Module:
    config = load_config(base, for_adapter=True)
    is_stored = quantization_of(config.to_dict()) is not None
    quantization = None if is_stored else _quantization_of_run(folder)
    if form == "unquantized" and is_stored:
        raise ConfigError(
            f"{base}: its weights are quantized. Name the model that it was made from with --base, or merge into the "
            "rounded weights with --dequantize."
        )
    if form == "unquantized" or (quantization is None and not is_stored):
        if form == "dequantized":
            raise ConfigError(
                f"--dequantize: {folder} names no quantized base, nor how its base was quantized. Remove --dequantize."
            )
        return _load(config, base, ConfigError, _NAME_BASE)
    dtype = config.dtype or torch.bfloat16
    _require_memory(local_folder(base))
    built = build_model(base, dtype=dtype, for_adapter=True, quantization=quantization)
    model: Any = materialize(built)
    if form == "dequantized":
        with torch.device("meta"):
            plain = type(model)._from_config(without_quantization(config), dtype=dtype)
        dequantize(model, plain, dtype)
    loaded: torch.nn.Module = model.eval().requires_grad_(False)
    return loaded


def _quantization_of_run(folder: Path) -> Quantization | None:
    """How the base of a run's adapter was quantized while it was read. None: not, or the folder does not say."""
    try:
        then = json.loads((folder / "run.json").read_text())
        settings = {field.name: then[field.name] for field in fields(Quantization)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not settings["load_in_4bit"] and not settings["load_in_8bit"]:
        return None
    return Quantization(**settings | {"llm_int8_skip_modules": tuple(settings["llm_int8_skip_modules"])})


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
