"""The fenced code blocks of README.md and docs/, and what a comment in the line before a block says about them.

    <!-- not run: needs a GPU -->             the block is checked, but tools/run_docs.py does not run it
    <!-- run with: 24GiB as 1GiB; a as b -->  replaced before it is run

Blocks are `bash` (commands), `yaml` (a run file, or some keys of one), `python`, `json` and `text` (output). A run file
is written to the name in its title: ```yaml title="lora.yaml"; without one, to run.yaml.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?:^<!-- (.+?) -->\n)?^```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None
    """Why."""
    replaced: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runnable(self) -> str:
        text = self.text
        for old, new in self.replaced:
            assert old in text, f"{self}: there is no {old} to replace"
            text = text.replace(old, new)
        return text

    @property
    def is_run_file(self) -> bool:
        return self.language == "yaml" and self.text.startswith("base_model:")

    @property
    def commands(self) -> list[str]:
        """Lines of a bash block, without those that are empty or comments; lines that end in a backslash are joined."""
        lines = self.runnable.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        comment, language, title, content = found.groups()
        not_run = with_ = None
        if comment is not None:
            comment = " ".join(comment.split())
            not_run = re.fullmatch(r"not run: (.+)", comment)
            with_ = re.fullmatch(r"run with: (.+)", comment)
        replaced = [pair.partition(" as ") for pair in with_[1].split("; ")] if with_ else []
        yield Block(
            page=page,
            line=text[: found.start(2)].count("\n") + 1,
            language=language,
            title=title,
            text=content,
            not_run=not_run[1] if not_run else None,
            replaced=tuple((old, new) for old, _, new in replaced),
        )


def commands_in_text(page: Path) -> list[str]:
    """`outsize ...` in a sentence."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [found.replace("\n", " ") for found in re.findall(r"`(outsize [a-z][^`]*)`", text)]
