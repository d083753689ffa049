"""The upload of a result to the hub."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from outsize.base.errors import ConfigError, SaveFailed
from outsize.run.hub import create_repository, upload


def test_the_result_is_uploaded_without_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **given: calls.append(given))
    upload(tmp_path, "me/model")
    (given,) = calls
    assert (given["repo_id"], given["folder_path"]) == ("me/model", tmp_path)
    assert "checkpoint-*/**" in given["ignore_patterns"]


class _ConnectError(Exception):
    """The errors of the hub's HTTP library are neither OSErrors nor ValueErrors."""


@pytest.mark.parametrize("kind", [OSError, _ConnectError])
def test_a_hub_that_refuses_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(self: HfApi, *args: Any, **given: Any) -> None:
        raise kind("401 Unauthorized\nmore")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    monkeypatch.setattr(HfApi, "upload_folder", refuse)
    with pytest.raises(ConfigError, match=r"me/model cannot be created \(401 Unauthorized\).*hf auth login"):
        create_repository("me/model")
    with pytest.raises(SaveFailed, match=rf"The result is complete in {tmp_path}: run `hf upload me/model"):
        upload(tmp_path, "me/model")


def test_a_hub_that_cannot_be_reached_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with pytest.raises(ConfigError, match=r"me/model cannot be created \(.*\)\. Check the network"):
        create_repository("me/model")
