"""Scores of a library's variants in one pass: the bits of a whole model of transformers with each one put in place."""

from pathlib import Path
from typing import Any

import pruned
import pytest
import torch
from transformers import AutoModelForCausalLM

from outsize.config.read import read_config
from outsize.methods.bypass.score import Scores, _Sums, replaced
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_scores import Pick, Scoring, Variants
from outsize.run.prune_setup import PruneSetup, set_up

FULL = pytest.mark.full


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("qwen3", marks=FULL), pytest.param("mixtral", marks=FULL)])
def test_one_pass_equals_one_model_per_replacement(tmp_path: Path, kind: str) -> None:
    yaml = pruned.write(tmp_path, kind, prune={"tokens": 100}, val_set_size=2)
    pruned.run(yaml)
    setup = set_up(read_config(yaml))
    variants = Variants(setup, Library(tmp_path / "out"), StoredImportance(setup, tmp_path / "out"))
    scoring = Scoring(variants, 10**6, None)
    picks = [Pick(layer, one, raw) for layer, each in setup.variants.items() for one in each for raw in (False, True)]
    _, found = scoring.of({pick.name: (pick,) for pick in picks}, lambda done, total: None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    assert len(found) == len(picks) >= 30
    for pick in picks:
        assert whole(setup, variants, model, pick) == found[pick.name], pick.name
    assert any(each.kl > 0 for each in found.values())


@torch.no_grad()
def whole(setup: PruneSetup, variants: Variants, model: Any, pick: Pick) -> Scores:
    """From forwards of the whole model."""
    place, sums = setup.stack.layers[pick.layer], _Sums()
    params = list(place.module.parameters())
    setup.teacher.load(params)
    modules = variants.modules(pick, variants.student(pick))
    setup.teacher.release(params)
    last: list[Any] = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: last.append(output))
    assert setup.validation is not None
    for k in range(setup.num_validation):
        given = setup.validation(k)
        expected = model(**given.arguments, use_cache=False).logits
        with replaced(model.get_submodule(place.name), modules):
            logits = model(**given.arguments, use_cache=False).logits
        theirs, own = (each if isinstance(each, torch.Tensor) else each[0] for each in last[-2:])
        sums.add(own, logits, theirs, expected, {**given.arguments, "labels": given.labels})
    handle.remove()
    return sums.means()
