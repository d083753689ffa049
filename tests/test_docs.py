"""The documentation matches the tree: its links resolve, the files and types it names exist, and it keeps its form."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = [path for path in DOCS if path.parent.name == "decisions" and path.name != "0005-traps.md"]


def _named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", DOCS, ids=_named(DOCS))
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("http")]
    files = re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml|c))`", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [file for file in files if not any((ROOT / start / file).exists() for start in ("", "src/outsize"))]
    assert missing == []


def test_the_types_of_the_architecture_are_defined_in_the_files_it_names() -> None:
    section = (ROOT / "docs/architecture.md").read_text().split("\n## Main types\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| `(\S+)` \|", section, re.MULTILINE)
    missing = [
        f"{name} in {file}"
        for names, file in rows
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"^(class {name}\b|{name} = )", (ROOT / "src/outsize" / file).read_text(), re.MULTILINE)
    ]
    assert len(rows) > 20 and missing == []


def test_the_architecture_lists_every_package() -> None:
    section = (ROOT / "docs/architecture.md").read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    packages = {path.parent.name for path in (ROOT / "src/outsize").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)) == packages


@pytest.mark.parametrize("path", DECISIONS, ids=_named(DECISIONS))
def test_a_decision_is_context_decision_evidence_in_60_lines(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Evidence"]
    assert len(lines) <= 60


def test_changelog_entries_are_one_line_and_say_what_kind_they_are() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().split("\n## ", 1)[1].splitlines()[1:]
    entries = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in entries if not re.match(r"- (Added|Changed|Fixed|Removed): .", line)] == []


def _anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=_named(DOCS))
def test_anchors_exist(path: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", path.read_text())
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in _anchors(path.parent / target if target else path)
    ]
    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=_named(DOCS))
def test_prose_has_at_most_120_columns(path: Path) -> None:
    long = [line for line in path.read_text().splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []
