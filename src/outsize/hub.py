"""Tells paths from hub ids, and asks the Hugging Face hub whether it can be reached, before libraries retry for half a
minute.
"""

from pathlib import Path

from outsize.base.errors import ConfigError

_SECONDS = 5


def require_model_path(model: str) -> None:
    """Raise if a model is neither a file or folder nor a possible hub id."""
    if not Path(model).exists() and not may_be_hub_id(model):
        raise ConfigError(f"{model}: there is no such folder. Correct the path, or name a hub id (owner/name).")


def may_be_hub_id(name: str) -> bool:
    is_below_a_folder = "/" in name and Path(name).parent.is_dir()
    return name[:1] not in "/.~" and name.count("/") <= 1 and "\\" not in name and not is_below_a_folder


def hub_answers(name: str, *, file: str = "README.md", repo_type: str = "model") -> bool:
    """Whether the hub says something about this id. One request, without retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=repo_type), timeout=_SECONDS)
    except (HfHubHTTPError, ValueError):  # an answer, or no valid id
        return True
    except Exception:  # of the HTTP library, which depends on huggingface_hub's version
        return False
    return True
