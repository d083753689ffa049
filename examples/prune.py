"""Prunes a small Llama on bytes and trains what is left: feed-forward width and KV heads to a quarter in all layers.

    python examples/prune.py

prints the loss of the teacher, of the pruned model before training and after, and compares importance with keeping the
first channels. Takes two minutes on one core. tools/byte_teacher.py has trained the teacher.
"""

import json
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from outsize.config.read import read_config
from outsize.methods.bypass.builder import build_student
from outsize.methods.bypass.variants import Variant
from outsize.run.prune import prune_run
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import LATEST, Library
from outsize.run.prune_setup import PruneSetup, set_up

TEACHER = Path(__file__).parent / "byte_teacher"
TOKENS, WIDTHS, WIDTH, HEADS = 128, (288, 192, 96), 96, 2
ROWS = 256
"""That losses are measured on."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    teacher: float
    pruned: float
    trained: float
    by_width: dict[int, tuple[float, float]]
    """Feed-forward width: loss of the pruned model by importance, and with the first channels kept."""

    @property
    def recovered(self) -> float:
        """Share of the loss that pruning costs."""
        return (self.pruned - self.trained) / (self.pruned - self.teacher)


def texts() -> list[str]:
    """Modules of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]


def write_run(folder: Path) -> Path:
    """The run file and its data: every eighth module is left out, and losses are measured on those."""
    data = folder / "data.jsonl"
    train = [text for number, text in enumerate(texts()) if number % 8]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in train))
    run: dict[str, Any] = {
        "base_model": str(TEACHER),
        "datasets": [{"path": str(data), "type": "completion"}],
        "sequence_len": TOKENS,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 3e-3,
        "bf16": False,
        "device": "cpu",
        "output_dir": str(folder / "pruned"),
        "prune": {
            "tokens": "120k",
            "importance_tokens": "32k",
            "intermediate_size": [WIDTH],
            "num_key_value_heads": [HEADS],
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def held_out() -> Tensor:
    """(rows, tokens)."""
    data = b"\0".join(text.encode() for number, text in enumerate(texts()) if number % 8 == 0)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    rows = flat[: len(flat) // TOKENS * TOKENS].view(-1, TOKENS)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:ROWS]]


def assembled(tensors: dict[str, Tensor], **sizes: int) -> nn.Module:
    """The teacher with other tensors in its layers."""
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    config = AutoConfig.from_pretrained(TEACHER, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict({**teacher.state_dict(), **tensors})
    return model


@torch.no_grad()
def loss_of(model: nn.Module, rows: Tensor) -> float:
    losses = [model(input_ids=part, labels=part, use_cache=False).loss for part in rows.split(32)]
    return float(torch.stack(losses).mean())


def untrained(setup: PruneSetup, importance: StoredImportance | None, variants: list[Variant]) -> dict[str, Tensor]:
    """Tensors of the pruned layers before training. `importance` None: the first channels are kept."""
    found = {}
    for layer, parts in setup.parts.items():
        setup.teacher.load(parts.layer.parameters())
        for variant in variants:
            student = build_student(parts, variant, importance.of(layer) if importance is not None else None)
            found |= {f"{parts.name}.{name}": tensor for name, tensor in student.layer_tensors().items()}
    return found


def measure(folder: Path, console: Console) -> Losses:
    path = write_run(folder)
    prune_run(read_config(path), console)
    setup, rows = set_up(read_config(path)), held_out()
    importance, library = StoredImportance(setup, folder / "pruned"), Library(folder / "pruned")
    sizes = {"intermediate_size": WIDTH, "num_key_value_heads": HEADS}
    trained: dict[str, Tensor] = {}
    for layer, variants in setup.variants.items():
        for variant in variants:
            entry = library.entry(layer, variant.name)
            assert entry is not None
            trained |= {f"{setup.parts[layer].name}.{name}": tensor for name, tensor in entry.tensors(LATEST).items()}
    by_width = {}
    for width in WIDTHS:
        ffn = next(variant for variant in setup.variants[0] if variant.learn == "ffn")
        narrow = replace(ffn, changes=(replace(ffn.changes[0], count=width),))
        by_width[width] = tuple(
            loss_of(assembled(untrained(setup, scores, [narrow]), intermediate_size=width), rows)
            for scores in (importance, None)
        )
    return Losses(
        teacher=loss_of(AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32), rows),
        pruned=loss_of(assembled(untrained(setup, importance, list(setup.variants[0])), **sizes), rows),
        trained=loss_of(assembled(trained, **sizes), rows),
        by_width=by_width,  # type: ignore[arg-type]
    )


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        losses = measure(Path(folder), Console())
    print(f"teacher                                {losses.teacher:.4f}")
    print(f"FFN and KV heads to a quarter, pruned  {losses.pruned:.4f}")
    print(f"                               trained {losses.trained:.4f}   {losses.recovered:.0%} of the loss recovered")
    for width, (important, first) in losses.by_width.items():
        print(f"FFN {width} of 384: by importance {important:.4f}, first channels {first:.4f}")


if __name__ == "__main__":
    main()
