"""The commands of docs/prune.md as written, on a tiny model: from a folder to smaller ones."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from outsize.cli.main import app
from outsize.run.example import write_example
from tools.doc_blocks import ROOT, blocks


def test_a_newcomer_gets_from_a_folder_to_smaller_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_example(tmp_path)
    printed = []
    for block in blocks(ROOT / "docs" / "prune.md"):
        assert block.not_run is None, block
        if block.is_run_file:
            Path("run.yaml").write_text(block.runnable)
        for command in block.commands if block.language == "bash" else []:
            name, *given = shlex.split(command, comments=True)
            assert name == "outsize"
            result = CliRunner().invoke(app, given)
            assert result.exit_code == 0, f"{block}: {command}\n{result.output}{result.stderr}"
            printed.append(result.output)
    dry, made, again, shown = printed
    assert "GPU" in dry.replace("CPU", "GPU") and "host" in dry and "disk" in dry and "choice" not in dry
    assert "best possible" in made and "trained" in made and "layer 3:" in made and "layer 3:" not in again
    teacher = AutoModelForCausalLM.from_pretrained("model").num_parameters()
    for share in ("0.7", "0.6"):
        (folder,) = Path("pruned/models").glob(f"params-{share}-*")
        assert folder.name in (made if share == "0.7" else again) and folder.name in shown
        moved = tmp_path / "elsewhere" / share
        shutil.copytree(folder, moved)
        model = AutoModelForCausalLM.from_pretrained(moved, trust_remote_code=True)
        assert 0.4 * teacher < model.num_parameters() <= float(share) * teacher
        asked = AutoTokenizer.from_pretrained(moved)("What is the capital of France?", return_tensors="pt")
        assert model.generate(**asked, max_new_tokens=3, do_sample=False).shape[1] > asked["input_ids"].shape[1]
        evaluation = json.loads((folder / "prune.json").read_text())["evaluation"]
        assert evaluation.keys() == {"teacher", "pruned", "trained"}
