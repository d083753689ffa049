"""The wheel: its tag, its description, and that it works without a checkout and without a compiler."""

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parent.parent
USE = """
import outsize, sys
from outsize.cli.main import app
from outsize.optim.native import find_kernel
from outsize.quant.native import find_kernel as find_quantizer

assert outsize.__file__.startswith(sys.argv.pop(1)), outsize.__file__
for found in (find_kernel(), find_quantizer()):
    assert not isinstance(found, str), found
app()
"""


@pytest.mark.full
def test_the_wheel_serves_every_python_and_needs_no_compiler(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text and "\n## Install\n" in text and "](docs/" not in text
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64).save_pretrained(tmp_path / "model")
    page = tmp_path / "page.html"
    args = ["plan", "model", "--hardware", "rtx4090", "--sequence-len", "32", "--html", str(page)]
    environment = {"PYTHONPATH": str(target), "PATH": "", "OUTSIZE_CACHE": "", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", USE, str(target), *args], check=True, cwd=tmp_path, env=environment)
    assert "<h1>model" in page.read_text()
