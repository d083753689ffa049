"""The messages of docs/troubleshooting.md are in the code, values aside."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tools.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TABLES = re.findall(r"^\| message \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
MESSAGES = [message for table in TABLES for message in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)]


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def texts_of_the_code() -> str:
    """Every string, values as …, a line each; %s and {…} of templates are values too."""
    trees = [ast.parse(path.read_text()) for path in Path(ROOT / "src").rglob("*.py")]
    found = {text.replace("\n", " ") for tree in trees for node in ast.walk(tree) if (text := _text(node))}
    return re.sub(r"%[sdr]|\{\w[\w.!]*\}", "…", "\n".join(sorted(found)))


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_code(message: str) -> None:
    # The setting at the beginning may be a value of the code, as in `gpu_memory`, or a key of a table.
    words = [
        message,
        message.partition(" ")[2],
        message.replace("Training forward 2", "…").replace("forward 1", "forward …"),
    ]
    found = [re.search(".*".join(map(re.escape, text.split("…"))), texts_of_the_code()) for text in words]
    assert any(found), message


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 40
