"""examples/prune.py: local training recovers most of what pruning costs, and importance is better than truncation."""

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

FOLDER = Path(__file__).resolve().parent.parent / "examples"


def test_the_teacher_is_small() -> None:
    files = list((FOLDER / "byte_teacher").iterdir())
    assert files and sum(path.stat().st_size for path in files) <= 3_000_000


@pytest.mark.full
def test_training_recovers_the_loss_and_importance_beats_truncation(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("prune_demo", FOLDER / "prune.py")
    assert spec is not None and spec.loader is not None
    demo: Any = importlib.util.module_from_spec(spec)
    sys.modules["prune_demo"] = demo
    spec.loader.exec_module(demo)
    losses = demo.measure(tmp_path, Console(file=io.StringIO()))
    assert losses.recovered >= 0.85
    assert all(important < first for important, first in losses.by_width.values())
