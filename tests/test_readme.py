"""The README is correct: its Python and YAML run, its commands exist, its source tree matches the packages."""

import re
from pathlib import Path

import folders
import pytest
import yaml
import zoo
from torch.utils.data import Dataset
from transformers import TrainingArguments
from typer.testing import CliRunner

from outsize.cli.main import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [text.replace("24GiB", "1GiB") for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)]


class Batches(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict:
        return {name: value[0] for name, value in zoo.batch("llama", size=1, seed=index).items()}


def test_the_loop_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [text for text in blocks("python") if "outsize.prepare" in text]
    monkeypatch.chdir(tmp_path)
    names = {
        "model": zoo.make("llama"),
        "batch": zoo.batch("llama"),
        "data": [zoo.batch("llama", seed=i) for i in range(3)],
    }
    exec(code, names)
    assert (tmp_path / "out" / "model.safetensors").exists() and names["engine"].num_steps == 3
    (with_retries,) = [text for text in blocks("python") if "engine.retrying" in text]
    exec(with_retries, names)
    assert names["engine"].num_steps == 6
    names["engine"].detach()


def test_the_trainer_example_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = [text for text in blocks("python") if "OutsizeTrainer(" in text]
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    names = {"model": zoo.make("llama"), "args": args, "data": Batches()}
    exec(code, names)
    assert names["trainer"].state.global_step == 2
    names["trainer"].engine.detach()


@pytest.mark.usefixtures("_profiles_anew")
def test_the_yaml_of_the_readme_trains_with_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("yaml")
    assert len(text.splitlines()) <= 13
    keys = yaml.safe_load(text)
    folders.write_model(tmp_path / keys["base_model"])
    folders.write_tokenizer(tmp_path / keys["base_model"])
    folders.write_chat(tmp_path / keys["datasets"][0]["path"])
    (tmp_path / "run.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    small = ["--set", "device=cpu", "--set", "sequence_len=48", "--set", "num_epochs=null", "--set", "save_steps=1"]
    commands = re.findall(r"^outsize (train run.yaml.*?) *(?:#.*)?$", README, re.MULTILINE)
    assert len(commands) == 2
    for number, command in enumerate(commands):
        result = CliRunner().invoke(
            app, [*command.replace("40GiB", "2GiB").split(), *small, "--set", f"max_steps={number + 1}"]
        )
        assert result.exit_code == 0, result.output + result.stderr
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "checkpoint-2").exists()


def test_the_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) == {"train", "test", "smoke"} <= targets
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"(?:^|`)outsize ([a-z]+)", README, re.MULTILINE)) == commands
