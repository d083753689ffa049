"""What a folder of `outsize prune` holds: the library, scores and models. Needs neither run file nor teacher."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outsize.base.errors import BadFile, ConfigError
from outsize.base.records import from_json
from outsize.run.prune_assemble import PRUNE_FILE
from outsize.run.prune_library import DESCRIPTION, Description
from outsize.run.prune_reduced import CHANNELS_FILE
from outsize.run.prune_scores import SCORES_FILE


def show_folder(folder: Path, console: Console) -> None:
    paths = sorted((folder / "library").glob(f"*/*/{DESCRIPTION}"))
    if not paths:
        raise ConfigError(f"{folder} has no library. Name the output_dir of outsize prune.")
    scores = _json(folder / SCORES_FILE).get("scores", {}) if (folder / SCORES_FILE).exists() else {}
    if (folder / CHANNELS_FILE).exists():
        kept = _json(folder / CHANNELS_FILE)
        console.print(f"hidden size {kept['hidden_size']} of {kept['of']}; channels {kept['hash']}", highlight=False)
    table = Table(
        "layer", "variant", "parameters", "tokens", "loss before", "after", "KL in the model", title="library"
    )
    for path in paths:
        found = from_json(Description, _json(path), where=str(path))
        losses = found.validation or found.losses
        key = f"{found.layer:03d}/{found.variant} {found.steps}"
        table.add_row(
            str(found.layer),
            found.variant + (f" (stopped at {found.stopped})" if found.stopped else ""),
            f"{found.numel:,}",
            f"{found.tokens:,}",
            f"{losses[0][1]:.4f}" if losses else "",
            f"{losses[-1][1]:.4f}" if losses else "",
            f"{scores[key]['kl']:.4g}" if key in scores else "",
        )
    console.print(table)
    models = sorted((folder / "models").glob(f"*/{PRUNE_FILE}"))
    if not models:
        return
    table = Table("model", "form", "parameters", "loss", "KL", "top-1", "variants", title="models")
    for path in models:
        facts = _json(path)
        evaluation, counts = facts["evaluation"], dict[str, int]()
        trained = evaluation.get("final", evaluation["trained"])
        for names in facts["variants"].values():
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        table.add_row(
            path.parent.name,
            facts["form"],
            f"{facts['predicted']['params']:,.0f}",
            f"{trained['loss']:.4f}",
            f"{trained['kl']:.4f}",
            f"{trained['top1']:.1%}",
            ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())),
        )
    console.print(table)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} is damaged ({error}). Remove its folder; the same command makes it again.") from None
