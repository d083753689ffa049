"""`outsize export`: writes a checkpoint as a plain Hugging Face folder, optionally with the adapter merged."""

import shutil
from pathlib import Path

import torch

from outsize.base.errors import ConfigError
from outsize.checkpoint.folder import StagedDir, os_errors_as_save_failed
from outsize.checkpoint.model_files import is_weight_file
from outsize.run.compat_checks import first_line
from outsize.run.result_folder import OURS, BaseForm, base_of, load_adapted, require_folder


def export_folder(
    source: Path, target: Path, *, merge: bool = False, base: str | None = None, dequantized: bool = False
) -> None:
    """Export `source`, a checkpoint or the output folder of a run.

    `merge`: merge the adapter into its base and write a whole model. `base`: the adapter's base, if it has moved.
    `dequantized`: merge into the values of its quantized weights, not into the weights that were quantized.
    """
    is_adapter = require_folder(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        found = "the folder is not empty" if target.is_dir() else "it is a file"
        raise ConfigError(f"{target}: {found}. Remove it, or name another folder.")
    if merge and not is_adapter:
        raise ConfigError(f"--merge: {source} has no adapter (adapter_config.json). Remove --merge.")
    if dequantized and not merge:
        raise ConfigError("--dequantize has no effect without --merge. Add it.")
    draft = StagedDir.into(target)
    try:
        with os_errors_as_save_failed(target):
            names = [
                path.name
                for path in source.iterdir()
                if path.is_file() and path.name not in OURS and not path.name.startswith(".")
            ]
            if merge:
                _merge(source, draft.path, base_of(source, base), "dequantized" if dequantized else "unquantized")
                names = [name for name in names if not name.startswith("adapter_") and name != "README.md"]
            for name in names:
                shutil.copyfile(source / name, draft.path / name)
        draft.commit_files(is_weight_file)
    except BaseException:
        draft.discard()
        raise


def _merge(adapter: Path, into: Path, base: str, form: BaseForm) -> None:
    """Merge with PEFT, in host memory."""
    model = load_adapted(adapter, base, fp32=True, form=form)
    try:
        with torch.no_grad():
            merged = model.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{adapter}: the adapter cannot be merged ({first_line(error)}). Use it unmerged.") from None
    merged.save_pretrained(into)
