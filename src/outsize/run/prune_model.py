"""From a library to models: scores, choices under each target, folders, evaluation and distillation."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outsize.base.cache_folder import write_whole
from outsize.base.errors import BadFile, ConfigError
from outsize.base.units import show_bytes
from outsize.checkpoint.folder import recover_partial_saves
from outsize.config.prune_target import PruneDistill
from outsize.hardware.host import free_host_bytes
from outsize.methods.bypass.costs import Use
from outsize.methods.bypass.score import Scores
from outsize.progress import Bar
from outsize.run.prune_assemble import PRUNE_FILE, Assembly
from outsize.run.prune_choice import Choosing, Chosen
from outsize.run.prune_distill import distill
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_scores import Pick, Scoring, StoredScores, Variants, base_picks
from outsize.run.prune_setup import PruneSetup

Say = Callable[[str], None]
_FORMS = {
    "per_layer": "per_layer: transformers loads it with trust_remote_code=True",
    "uniform": "uniform: loads everywhere",
    "padded": "padded with zeros to the teacher's size: loads everywhere, and saves nothing",
}


@dataclass(frozen=True, slots=True)
class PrunedModel:
    chosen: Chosen
    folder: Path
    teacher: Scores
    pruned: Scores
    """With the variants as they were before training."""
    trained: Scores
    final: Scores | None = None
    """After distillation."""


def make_models(setup: PruneSetup, console: Console) -> list[PrunedModel]:
    """A model for each target. What an earlier run has scored or written is not made again."""
    folder, prune = Path(setup.config.output_dir), setup.prune
    say: Say = lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False)
    setup = _with_library_only(setup, Library(folder), say)
    importance = StoredImportance(setup, folder)
    importance.rank()
    setup = setup.of_reduced()
    variants = Variants(setup, Library(folder), importance)
    _require_base(setup, variants.library)
    scoring = Scoring(variants, prune.score_tokens, free_host_bytes() // 2)
    if not scoring.is_held_out:
        say("scores and evaluation use rows of the training data; test_datasets or val_set_size hold others out")
    if (written := folder / "models").exists():
        recover_partial_saves(written)  # a kill may have left one that is complete under another name
    choices = _choices(setup, variants, scoring, folder, say)
    models: list[PrunedModel] = []
    for chosen, choosing in choices:
        say(_choice_text(chosen))
        place = written / f"{chosen.name}-{_identity(setup, chosen, variants.library)}"
        if (earlier := _read(place, chosen)) is not None:
            say(f"model    {place} is there already")
            models.append(earlier)
            continue
        assembly = Assembly(variants, chosen.variants, choosing.places)
        assembly.require(prune.form)
        kept = {} if setup.reduced is None else {"hidden_size": prune.hidden_size, "channels": setup.reduced.hash}
        with Bar("evaluating") as bar:
            models_of = {"pruned": _picks(chosen, is_raw=True), "trained": _picks(chosen)} if chosen.variants else {}
            teacher, found = scoring.of(models_of, _shown_in(bar))
        made = PrunedModel(chosen, place, teacher, found.get("pruned", teacher), found.get("trained", teacher))
        form = assembly.write(place, prune.form, {**kept, **_facts(made)})
        say(f"model    {place} ({_FORMS[form]})")
        models.append(made)
    if prune.distill is not None:
        for number, model in enumerate(models):
            say(f"distill  {model.folder}")
            if (result := distill(setup, model.folder, console)) is None:
                say("stopped before the end; the same command continues")
                return models
            models[number] = replace(model, final=_final(model, result, scoring, prune.distill))
    console.print(_table(models))
    if len(models) > 1:
        say(_curve(models))
    return models


def _final(model: PrunedModel, result: Path, scoring: Scoring, how: PruneDistill) -> Scores:
    """The evaluation of a distilled model, in the prune.json of its folder."""
    path = result / PRUNE_FILE
    if path.exists():
        (final,) = _evaluation(path, ("final",))
        if (before := json.loads(path.read_text()).get("distill")) != asdict(how):
            raise ConfigError(
                f"prune.distill: {result} was trained with {before}. Set that, or move the folder to train another."
            )
        return final
    final = scoring.of_folder(result)
    facts = json.loads((model.folder / PRUNE_FILE).read_text())
    facts["evaluation"]["final"], facts["distill"] = asdict(final), asdict(how)
    write_whole(path, json.dumps(facts, indent=1) + "\n")
    return final


def _curve(models: Sequence[PrunedModel]) -> str:
    """KL over parameters, one line each."""
    found = sorted((model.chosen.predicted["params"], (model.final or model.trained).kl) for model in models)
    most = max(kl for _, kl in found) or 1.0
    lines = [f"{params:>16,.0f}  {kl:<10.4g} {'█' * math.ceil(50 * kl / most)}" for params, kl in found]
    return "\n".join([f"{'parameters':>16}  KL", *lines])


def _with_library_only(setup: PruneSetup, library: Library, say: Say) -> PruneSetup:
    """The setup with the variants that the library has."""
    if not setup.prune.target:
        raise ConfigError("prune.target: missing. Name a limit, for example {params: 0.7}.")
    found = {
        layer: tuple(variant for variant in variants if library.entry(layer, variant.name) is not None)
        for layer, variants in setup.variants.items()
    }
    total, held = (sum(map(len, each.values())) for each in (setup.variants, found))
    if not held:
        raise ConfigError(
            f"prune: {library.folder} has no library yet. Leave --only out, which trains the variants first."
        )
    if held < total:
        say(f"library  has {held} of {total} variants; the others are left out")
    return replace(setup, variants={layer: variants for layer, variants in found.items() if variants})


def _require_base(setup: PruneSetup, library: Library) -> None:
    """With `hidden_size`, every model has an unpruned or a pruned variant wherever one is trained."""
    for pick in base_picks(setup):
        entry = library.entry(pick.layer, pick.variant.name)
        if entry is None or entry.description.stopped:
            why = "is missing" if entry is None else f"was stopped at {entry.description.stopped}"
            raise ConfigError(
                f"prune.hidden_size: {pick.name} {why}, and others are scored beside it. Train it: leave --only out, "
                "or use another output_dir with a lower learning_rate."
            )


def _choices(
    setup: PruneSetup, variants: Variants, scoring: Scoring, folder: Path, say: Say
) -> list[tuple[Chosen, Choosing]]:
    picks = [Pick(layer, variant) for layer, each in setup.variants.items() for variant in each]
    if setup.prune.score == "local":
        scores = {pick.name: _local_score(variants.library, pick) for pick in picks}
    else:
        with Bar("scoring") as bar:
            _, found = StoredScores(variants, scoring, folder).measure(picks, _shown_in(bar))
        base = next((found[pick.name].kl for pick in base_picks(setup)), 0.0)
        scores = {name: each.kl - base for name, each in found.items()}
    known: dict[tuple[Use, bool], Choosing] = {}
    choices = []
    for target in setup.prune.target:
        use = Use(batch=target.batch, context=target.context, decoded=target.decoded)
        timed = target.latency is not None and setup.prune.costs is None
        if (use, timed) not in known:
            known[use, timed] = Choosing(setup, scores, use, timed=timed)
        choices.append((known[use, timed].choose(target), known[use, timed]))
    return choices


def _local_score(library: Library, pick: Pick) -> float:
    """The variant's own loss after training. A skipped sub-block has none: its error is all of the target, 1."""
    stored = library.entry(pick.layer, pick.variant.name)
    found = None if stored is None else stored.description.validation or stored.description.losses
    if not pick.variant.is_trained:
        return 1.0
    return found[-1][1] if found else math.inf


def _picks(chosen: Chosen, *, is_raw: bool = False) -> tuple[Pick, ...]:
    return tuple(Pick(layer, variant, is_raw) for layer, each in chosen.variants.items() for variant in each)


def _identity(setup: PruneSetup, chosen: Chosen, library: Library) -> str:
    """Of everything that the model's weights depend on."""
    parts: list[Any] = [setup.spec.fingerprint, setup.prune.form]
    if setup.reduced is not None:
        parts.append(setup.reduced.hash)
    for pick in _picks(chosen):
        stored = library.entry(pick.layer, pick.variant.name)
        parts.append((pick.name, 0 if stored is None else stored.description.steps))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def _facts(model: PrunedModel) -> dict[str, Any]:
    chosen = model.chosen
    return {
        "target": asdict(chosen.target),
        "variants": {f"{layer:03d}": [each.name for each in some] for layer, some in chosen.variants.items()},
        "predicted": dict(chosen.predicted),
        "of_teacher": dict(chosen.teacher),
        "score": chosen.choice.score,
        "gap": chosen.choice.gap if math.isfinite(chosen.choice.gap) else None,
        "evaluation": {name: asdict(getattr(model, name)) for name in ("teacher", "pruned", "trained")},
    }


def _read(place: Path, chosen: Chosen) -> PrunedModel | None:
    if not place.exists():
        return None
    return PrunedModel(chosen, place, *_evaluation(place / PRUNE_FILE, ("teacher", "pruned", "trained")))


def _evaluation(path: Path, names: Sequence[str]) -> list[Scores]:
    try:
        found = json.loads(path.read_text())["evaluation"]
        return [Scores(**found[name]) for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{path} is damaged ({error}). Remove its folder; the same command makes it again.") from None


def _choice_text(chosen: Chosen) -> str:
    limits = chosen.target.limits
    parts = []
    for name, value in chosen.predicted.items():
        share = value / chosen.teacher[name] if chosen.teacher[name] else 1.0
        limit = ", ".join(f"{key.replace('_', ' ')} {number:g}" for key, number in limits.get(name, {}).items())
        parts.append(
            f"{name} {_amount(name, value)} ({share:.1%} of the teacher's{f', target {limit}' if limit else ''})"
        )
    gap = chosen.choice.gap
    far = f"at most {gap:.1%} from the best" if math.isfinite(gap) else "not known how far from the best"
    proven = "best possible" if chosen.choice.proven else f"{far}; time was up"
    counts: dict[str, int] = {}
    for some in chosen.variants.values():
        for variant in some:
            counts[variant.name] = counts.get(variant.name, 0) + 1
    what = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) or "the teacher as it is"
    return f"choice   {what}\n         {'; '.join(parts)}\n         summed score {chosen.choice.score:.4g}, {proven}"


def _amount(name: str, value: float) -> str:
    if name == "memory":
        return show_bytes(int(value))
    return f"{value:,.0f}" if name == "params" else f"{value * 1e3:,.1f} ms"


def _table(models: Sequence[PrunedModel]) -> Table:
    table = Table("model", "parameters", "weights", "loss", "KL", "top-1", title="on the same rows")
    if models:
        _add_row(table, "teacher", models[0].chosen.teacher, "its own", models[0].teacher)
    for model in models:
        rows = [("pruned", model.pruned), ("trained", model.trained), ("distilled", model.final)]
        for weights, found in rows:
            if found is not None:
                _add_row(table, model.folder.name, model.chosen.predicted, weights, found)
    return table


def _add_row(table: Table, name: str, costs: Mapping[str, float], weights: str, found: Scores) -> None:
    numbers = (f"{found.loss:.4f}", f"{found.kl:.4f}", f"{found.top1:.1%}")
    table.add_row(name, f"{costs['params']:,.0f}", weights, *numbers)


def _shown_in(bar: Bar) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.advance()

    return show
