"""A newcomer's first hour in a new environment: pip install, then every command of the pages, and the site."""

import os
import subprocess

import pytest

from tools.doc_blocks import ROOT


@pytest.mark.full
def test_every_command_of_the_docs_runs_after_pip_install() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    result = subprocess.run(
        [ROOT / "tools" / "fresh_install.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    assert "0 failed." in result.stdout
