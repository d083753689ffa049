"""The table of traps (docs/decisions/0005-traps.md) is complete, and the tests it names exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/decisions/0005-traps.md").read_text()
ROWS = dict(re.findall(r"^\| ([A-I]\d+) \| (.+) \|$", TEXT, re.MULTILINE))
PRUNING = dict(re.findall(r"^\| (D\d+ .+?) \| (.+) \|$", TEXT.split("\nPart 2, bypass distillation")[1], re.MULTILINE))
"""Of part 2, whose ids are not those of part 1."""
MUST = [f"{letter}{n}" for letter, last in (("A", 25), ("B", 15), ("C", 22), ("D", 23)) for n in range(1, last + 1)]


def test_every_trap_of_sections_a_to_d_is_listed() -> None:
    assert [trap for trap in MUST if trap not in ROWS] == []


def test_every_trap_of_bypass_distillation_is_listed() -> None:
    listed = [trap for row in PRUNING for trap in re.findall(r"\bD\d+\b", row)]
    assert listed == [*(f"D{n}" for n in range(1, 26)), "D50"]


def test_every_named_test_exists() -> None:
    missing = []
    for trap, row in (ROWS | PRUNING).items():
        for path, _, function in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", row):
            file = ROOT / path
            names = (
                {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
                if file.exists()
                else set()
            )
            if not file.exists() or (function and function not in names):
                missing.append(f"{trap}: {path}::{function}")
    assert missing == []
