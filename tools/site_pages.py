"""mkdocs hook: the site's pages that are not below docs/, and the links between them and docs/.

README.md becomes index.md. CHANGELOG.md and benchmarks/results/ keep their paths. In docs/decisions/ a list of the
decisions is added. Pages are written for GitHub, where links are relative to the file in the repository.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [f"- [{path.read_text().splitlines()[0].lstrip('# ')}]({path.name})" for path in decisions]
    files.append(File.generated(config, "decisions/index.md", content="\n".join(["# Decisions", "", *titles, ""])))
    for path in (ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks" / "results").iterdir())):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in ("index.md", "CHANGELOG.md"):
        markdown = markdown.replace("](docs/", "](").replace("](decisions/)", "](decisions/index.md)")
    return re.sub(r"\]\((?:\.\./)+(benchmarks/|CHANGELOG)", rf"]({'../' * page.file.src_uri.count('/')}\1", markdown)
