"""`prune.sweep`: several pruning runs from one file.

An entry is the file with other keys under `prune`, read anew, so no entry's settings or results reach another. Its
folder is named by its keys: order and number of entries may change, and finished ones are recognized.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from outsize.base.errors import OutsizeError
from outsize.config.read import read_config
from outsize.run.prune import prune_run


def sweep_run(path: Path, overrides: Sequence[str], console: Console, *, dry_run: bool = False) -> list[str]:
    """Run all entries. Returns what failed: an entry that cannot run does not stop the others. Ctrl-C does."""
    base = read_config(path, overrides)
    assert base.prune is not None
    failed: list[str] = []
    say = lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False)
    for number, entry in enumerate(base.prune.sweep, 1):
        text = json.dumps(entry, sort_keys=True)
        folder = Path(base.output_dir) / "sweep" / hashlib.sha256(text.encode()).hexdigest()[:8]
        say(f"entry    {number} of {len(base.prune.sweep)}: {text}\n         in {folder}")
        changes = [f"prune.{key}={json.dumps(value)}" for key, value in entry.items()]
        try:
            config = read_config(path, [*overrides, "prune.sweep=null", *changes, f"output_dir={folder}"])
            outcome = prune_run(config, console, dry_run=dry_run)
        except OutsizeError as error:
            say(f"failed   {error}")
            failed.append(f"{number}: {error}")
            continue
        if not outcome.is_finished and not dry_run:
            say("stopped; the same command continues with this entry")
            return failed
    return failed
