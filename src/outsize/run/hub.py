"""Uploads the result of a run to the hub (`hub_model_id`)."""

from pathlib import Path

from huggingface_hub import HfApi

from outsize.base.errors import ConfigError, SaveFailed
from outsize.run.compat_checks import first_line


def create_repository(name: str) -> None:
    """Before training, so that a wrong name or a missing login is found then."""
    try:
        HfApi().create_repo(name, exist_ok=True)
    except Exception as error:  # of the hub, or of its HTTP library, which depends on its version
        raise ConfigError(
            f"hub_model_id: {name} cannot be created ({first_line(error)}). Check the network, log in with "
            "`hf auth login`, or remove it."
        ) from None


def upload(folder: Path, name: str) -> None:
    """The files of the result, without checkpoints."""
    try:
        HfApi().upload_folder(repo_id=name, folder_path=folder, ignore_patterns=["checkpoint-*/**", ".*"])
    except Exception as error:
        raise SaveFailed(
            f"hub_model_id: the upload to {name} failed ({first_line(error)}). The result is complete in {folder}: run "
            f"`hf upload {name} {folder}`."
        ) from None
