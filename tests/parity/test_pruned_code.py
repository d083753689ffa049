"""Pruning a teacher whose class is code of its folder: the folders have that code, and load where outsize is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pruned
import pytest
import torch
from safetensors.torch import save_file

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.model.build import build_model
from outsize.run.prune import PruneOutcome

CODE = {
    "own.py": "from transformers import LlamaForCausalLM\n\nfrom .own_config import OwnConfig\n\n\n"
    "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n",
    "own_config.py": "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
}
LOAD = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except ValueError:
        pass
    else:
        sys.exit(folder + ": loaded without its code")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        torch.save(model.eval()(input_ids=torch.arange(3, 27).view(2, 12)).logits, folder + "/logits.pt")
assert not any(name.split(".")[0] == "outsize" for name in sys.modules)
"""


def write(folder: Path) -> Path:
    variants = {"intermediate_size": [24], "num_key_value_heads": [1], "linear": False, "copy": []}
    own = {"trust_remote_code": True, "tokens": 90, "target": {"params": 0.8}}
    yaml = pruned.write(folder, prune={**variants, **own}, val_set_size=2, bf16=False)
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path.write_text(json.dumps(config))
    for name, text in CODE.items():
        (folder / "model" / name).write_text(text)
    return yaml


def test_d22_folders_have_the_teachers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    yaml = write(tmp_path)
    runs: list[PruneOutcome] = [
        pruned.run(yaml, *more) for more in ([], ["prune.form=padded"], ["prune.shape=uniform"])
    ]
    folders = [made.folder for run in runs for made in run.models]
    forms = [json.loads((folder / "prune.json").read_text())["form"] for folder in folders]
    assert forms == ["per_layer", "padded", "uniform"]
    for folder, form in zip(folders, forms, strict=True):
        assert {name: (folder / name).read_text() for name in CODE} == CODE
        module = "modeling_pruned.PrunedOwnModel" if form == "per_layer" else "own.OwnModel"
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map == {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": module}
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").rename(tmp_path / "elsewhere" / "model")  # only the folders are there
    subprocess.run([sys.executable, str(script), *map(str, folders)], check=True, cwd=tmp_path, env=environment)
    per_layer, padded, uniform = (torch.load(folder / "logits.pt") for folder in folders)
    torch.testing.assert_close(padded, per_layer, rtol=1e-4, atol=1e-5)
    assert uniform.isfinite().all() and not torch.allclose(uniform, per_layer)
    with pytest.raises(ModelUnsupported, match="a pruned model of a class that transformers lacks"):
        build_model_of(folders[0], tmp_path)


def build_model_of(folder: Path, tmp_path: Path) -> None:
    """With the config of the class that the code is over: what the folder's own config class needs its code for."""
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    del config["auto_map"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, plain / "model.safetensors")
    build_model(str(plain), dtype=torch.float32)


def test_distillation_of_such_a_teacher_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prune.distill: .* has model code of its own"):
        pruned.run(write(tmp_path), "prune.distill={tokens: 100}")
    assert not (tmp_path / "out" / "spec.json").exists()
