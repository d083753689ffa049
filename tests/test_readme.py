"""The README tells the truth: its Python runs, its commands exist, its tree is the tree."""

import re
from pathlib import Path

import pytest
import zoo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1].replace("24GiB", "1GiB")  # type: ignore[index]
    monkeypatch.chdir(tmp_path)
    names = {"model": zoo.make("llama"), "batch": zoo.batch("llama"), "data": [zoo.batch("llama", seed=i) for i in range(3)]}
    exec(code, names)
    assert (tmp_path / "out" / "model.safetensors").exists() and names["engine"].num_steps == 3
    names["engine"].detach()


def test_the_commands_of_the_readme_exist() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) == {"train", "test"} <= verbs
    commands = {path.stem for path in (ROOT / "src/outsize/cli").glob("*.py")} - {"__init__", "main"}
    assert set(re.findall(r"`outsize ([a-z]+)", README)) == commands


def test_the_tree_of_the_readme_is_the_tree() -> None:
    tree = re.search(r"```\nsrc/outsize/\n(.*?)```", README, re.DOTALL)[1]  # type: ignore[index]
    rooms = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    assert rooms == {path.name for path in (ROOT / "src/outsize").iterdir() if path.is_dir() and path.name != "__pycache__" and any(path.glob("*.py"))}
