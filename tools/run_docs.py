"""Runs the commands, run files and Python of README.md and docs/ as they are written: `python -m tools.run_docs`.

Each page has a copy of the repository as its working folder and an empty home. Models and data of the names that pages
use are tiny stand-ins, of `outsize example`. What is not run is listed with the reason (tools/doc_blocks.py).
Arguments: names of pages, such as quickstart.md. `tools/fresh_install.sh` does this in a new environment.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers.utils import logging

from outsize.run.example import write_data, write_model
from tools.doc_blocks import PAGES, ROOT, Block, blocks

RUN = """\
base_model: ./model
datasets: [data.jsonl]
sequence_len: 128
max_steps: 2
"""
"""run.yaml of pages that have none."""
MODELS = ("model", "path/to/model", "path/to/config", "models/llama-8b", "models/llama-7b")
DATA = ("data.jsonl", "chats.jsonl")
COMMAND_SECONDS = 600


def copy_repository(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    for name in names or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def write_stand_ins(folder: Path) -> None:
    """For pages that do not write them with `outsize example`."""
    write_model(folder / MODELS[0])
    for name in MODELS[1:]:
        shutil.copytree(folder / MODELS[0], folder / name)
    for name in DATA:
        write_data(folder / name)
    (folder / "run.yaml").write_text(RUN)


def scripts(block: Block) -> list[str]:
    """The shell commands of a block."""
    if block.language == "bash":
        return block.commands
    return [f"python - <<'EOF'\n{block.runnable}EOF"] if block.language == "python" else []


def run_page(page: Path, work: Path) -> tuple[int, int]:
    """The number of commands that ran, and of those that failed."""
    folder, home = work / page.stem, work / f"{page.stem}-home"
    if any(block.not_run is None and scripts(block) for block in blocks(page)):
        copy_repository(folder)
        if "\noutsize example\n" not in page.read_text():
            write_stand_ins(folder)
        write_stand_ins(home)
    # One thread: small operators on several are many times slower as soon as another process uses a core.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"HOME": str(home), "OUTSIZE_CACHE": str(home / "cache")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    ran = failed = 0
    for block in blocks(page):
        if block.not_run is not None:
            print(f"not run  {block}: {block.not_run}", flush=True)
            continue
        if block.is_run_file and folder.exists():
            (folder / (block.title or "run.yaml")).write_text(block.runnable)
        for script in scripts(block):
            started = time.perf_counter()
            result = subprocess.run(
                ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True,
                timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            seconds, is_good = time.perf_counter() - started, result.returncode == 0
            what = " ".join(script.split("  #")[0].split()) if block.language == "bash" else "python"
            with_ = "".join(f" [{old} as {new}]" for old, new in block.replaced)
            print(f"{'ran     ' if is_good else 'FAILED  '} {block}: {what}{with_} ({seconds:.1f} s)", flush=True)
            if not is_good:
                print(result.stdout[-4000:], result.stderr[-4000:], flush=True)
            ran, failed = ran + 1, failed + (not is_good)
    return ran, failed


def main(names: list[str]) -> int:
    logging.disable_progress_bar()
    pages = [page for page in PAGES if not names or page.name in names]
    with tempfile.TemporaryDirectory() as work:
        counts = [run_page(page, Path(work)) for page in pages]
    ran, failed = (sum(column) for column in zip(*counts, strict=True))
    print(f"{ran} commands of {len(pages)} pages ran, {failed} failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
