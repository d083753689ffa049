"""Pruning runs have the bits of a plain loop over whole layers, however memory is planned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pruned
import pytest

KINDS = ("llama", "qwen3", "gpt2", "mixtral", "gemma3")
CELLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"bf16": False, "gradient_accumulation_steps": 1}, {"loss": "nmse_token"}),
    ({"max_grad_norm": 0, "gradient_accumulation_steps": 3}, {"learn": "block"}),
    ({"bf16": False}, {"loss": "cosine"}),
    ({"gradient_accumulation_steps": 3}, {"loss": "mse", "kv_heads": "first"}),
]
"""Keys of the run, and under `prune`."""


def in_memory(yaml: Path, folder: Path) -> list[str]:
    return []


def in_files(yaml: Path, folder: Path) -> list[str]:
    made = pruned.run(yaml, dry_run=True).plan
    return [f"host_memory={made.host_bytes - 1}", f"prune.cache_dir={folder / 'cache'}"]


def in_rounds(yaml: Path, folder: Path) -> list[str]:
    made = pruned.run(yaml, dry_run=True).plan
    return [f"host_memory={made.host_bytes - made.hidden_bytes + made.hidden_bytes * 45 // 100}"]


def in_groups(yaml: Path, folder: Path) -> list[str]:
    return ["device=sim:64MiB", f"gpu_memory={pruned.least_gpu_memory(yaml, 'device=sim:64MiB', 'gpu_memory=1KiB')}B"]


WAYS = {"memory": in_memory, "files": in_files, "rounds": in_rounds, "groups": in_groups}


def variants_of(kind: str) -> dict[str, Any]:
    """What the kind of model can have."""
    if kind == "gpt2":
        return {"num_key_value_heads": []}
    return {"experts": [2], "copy": ["attention"]} if kind == "mixtral" else {}


def require_equal(folder: Path, kind: str, cell: int, ways: list[str], parity_cell: Callable[[object], None]) -> None:
    keys, prune = CELLS[cell]
    yaml = pruned.write(folder, kind, prune={**variants_of(kind), **prune}, **keys)
    expected = pruned.plain(yaml)
    for way in ways:
        out = folder / way
        outcome = pruned.run(yaml, f"output_dir={out}", *WAYS[way](yaml, folder))
        assert outcome.is_finished
        assert way != "files" or outcome.plan.in_file
        assert way != "rounds" or len(outcome.plan.rounds) >= 2
        assert way != "groups" or outcome.plan.num_groups > 1
        assert way != "groups" or outcome.gpu_peak_bytes <= outcome.plan.gpu_bytes
        pruned.require_equal(pruned.library(out), expected)
        parity_cell((kind, cell, way))


@pytest.mark.parametrize(("kind", "cell"), list(zip(KINDS, range(5), strict=True)))
def test_a_run_equals_the_plain_loop(
    tmp_path: Path, kind: str, cell: int, parity_cell: Callable[[object], None]
) -> None:
    ways = list(WAYS) if kind == "llama" else [list(WAYS)[cell % 4]]
    require_equal(tmp_path, kind, cell, ways, parity_cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_the_plain_loop_in_every_way(
    tmp_path: Path, kind: str, cell: int, parity_cell: Callable[[object], None]
) -> None:
    require_equal(tmp_path, kind, cell, list(WAYS), parity_cell)
