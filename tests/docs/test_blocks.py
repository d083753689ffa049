"""The code blocks of README.md and docs/: commands parse, run files are accepted, Python compiles, names are public."""

import ast
import builtins
import re
import shlex
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import outsize
from outsize.cli.main import app
from outsize.config.read import parse_config
from outsize.config.run import RunConfig
from tools.doc_blocks import PAGES, ROOT, Block, blocks, commands_in_text

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"bash", "yaml", "python", "json", "text"}
COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
UsageError: type[Exception] = typer.BadParameter.__base__  # of click, or of the copy of it that typer has


def of_language(*languages: str) -> "pytest.MarkDecorator":
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=map(str, found))


def test_every_block_names_its_language_and_every_comment_is_of_a_block() -> None:
    assert [f"{block}: {block.language}" for block in BLOCKS if block.language not in LANGUAGES] == []
    for page in PAGES:
        text = page.read_text()
        assert text.count("<!-- ") == sum(bool(b.not_run or b.replaced) for b in BLOCKS if b.page == page), page.name
        assert len(re.findall("^ *```", text, re.MULTILINE)) == 2 * sum(b.page == page for b in BLOCKS), page.name


@of_language("bash")
def test_commands_parse(block: Block) -> None:
    assert block.commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in block.commands:
        name, *given = shlex.split(command, comments=True)
        if name == "outsize":
            try:
                COMMANDS[given[0]].make_context(given[0], given[1:])
            except typer.Exit:
                pass  # --legend has printed
            except UsageError as error:
                pytest.fail(f"{block}: {command}: {error}")
        elif name == "python" and given[0] == "-m":
            assert find_spec(given[1]) is not None, command
        elif name == "make":
            assert given[0] in targets, command


def test_commands_in_sentences_have_known_options() -> None:
    unknown = []
    for page in PAGES:
        for text in commands_in_text(page):
            _, name, *rest = text.split()
            command = COMMANDS.get(name)
            known = {option for param in command.params for option in param.opts} if command else set()
            wrong = [part for part in rest if part.startswith("--") and part not in {*known, "--help"}]
            unknown += [f"{page.name}: {text}"] if command is None or wrong else []
    assert unknown == []


@of_language("yaml")
def test_run_files_are_accepted(block: Block) -> None:
    """Whole ones as they are; some keys of a run, or of a dataset, inside a whole one."""
    given = yaml.safe_load(block.text)
    if not block.is_run_file:
        dataset = {"path": "data.jsonl"}
        is_of_run = set(given) <= {field.name for field in fields(RunConfig)}
        given = {"base_model": "m", "datasets": [dataset], **given} if is_of_run else {**dataset, **given}
        given = given if is_of_run else {"base_model": "m", "datasets": [given]}
    parse_config(given, str(block))


@of_language("python")
def test_python_compiles_and_what_is_run_defines_its_names(block: Block) -> None:
    nodes = list(ast.walk(ast.parse(block.text, str(block))))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    imported = [node for node in nodes if isinstance(node, ast.alias)]
    defined |= {alias.asname or alias.name.split(".")[0] for alias in imported}
    assert block.not_run or used - defined <= set(dir(builtins)), "say <!-- not run: why --> in the line before it"


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^::: (\S+)", page, re.MULTILINE))
    missing = [
        name for name in outsize.__all__ if outsize._MODULES.get(name, "") + f".{name}" not in listed and name != "osft"
    ]
    assert missing == []
    for name in listed - {"outsize.base.errors"}:
        module, _, attribute = name.rpartition(".")
        path = ROOT / "src" / Path(*module.split("."))
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        defined = [node for node in ast.parse(source).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        assert [bool(ast.get_docstring(node)) for node in defined if node.name == attribute] == [True], name


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert [page.name for page in PAGES[1:] if f": {page.name}\n" not in navigation] == []
