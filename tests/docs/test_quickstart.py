"""The quickstart as written, with the installed packages: a tiny model, an adapter, a plan, a chat, an export."""

import contextlib
import io
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outsize.cli.main import app
from tools.doc_blocks import ROOT, Block, blocks

PAGE = ROOT / "docs" / "quickstart.md"
LEFT_OUT = {"outsize doctor", "head -n 2 data.jsonl"}  # tests/unit/cli/test_cli.py; not ours


def run(block: Block) -> str:
    """Runs the block's commands in this process; returns what they print."""
    printed = ""
    for command in block.commands:
        name, *given = shlex.split(command, comments=True)
        if " ".join([name, *given]) in LEFT_OUT:
            continue
        assert name == "outsize"
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0, f"{block}: {command}\n{result.output}{result.stderr}"
        printed += result.output
    return printed


@pytest.mark.usefixtures("_profiles_anew")
def test_the_quickstart_ends_with_a_model_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ""
    for block in blocks(PAGE):
        if block.not_run is not None:
            continue
        if block.is_run_file:
            assert block.title is not None
            Path(block.title).write_text(block.runnable)
        elif block.language == "bash":
            printed += run(block)
        elif block.language == "python":
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                exec(compile(block.text, str(block), "exec"), {})
            assert told.getvalue() == "The capital of Japan is Tokyo.\n"
    assert "The capital of France is Paris." in printed
    assert "result  out\n" in printed and "saved merged: a plain Hugging Face model, for from_pretrained" in printed
