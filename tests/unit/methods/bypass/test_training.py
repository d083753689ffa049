"""Students in training: they do not see one another, and the teacher and the rest of its layer stay as they are."""

import pytest
import torch
from pruning import first_layer, teacher, variant
from torch import Tensor

from outsize.device.cpu import CpuDevice
from outsize.methods.bypass.builder import build_student, student_numels
from outsize.methods.bypass.losses import nmse
from outsize.methods.bypass.variants import Change, Variant
from outsize.optim.adamw import AdamW
from outsize.optim.flat import FlatModule, flat_bytes, new_scratch

BLOCK = Variant(learn="block", changes=(Change(subblock="ffn", kind="intermediate_size", count=24),))
VARIANTS = [
    variant("intermediate_size", 24),
    variant("num_key_value_heads", 2),
    variant("linear"),
    variant("copy", subblock="attention"),
    BLOCK,
]


def trained(
    parts, runs, variants: list[Variant], steps: int = 3, perturbed: tuple[str, ...] = ()
) -> dict[str, dict[str, Tensor]]:
    device, spec = CpuDevice(), AdamW(betas=(0.9, 0.95), max_grad_norm=1.0)
    scratch = new_scratch(device, spec)
    students = {one.name: build_student(parts, one) for one in variants}
    for param in (param for name in perturbed for param in students[name].parameters()):
        param.data.add_(torch.randn_like(param))
    flats = {name: FlatModule(made, spec, device, scratch) for name, made in students.items()}
    for _ in range(steps):
        for one in variants:
            given = runs[one.learn]
            nmse(students[one.name](given), given.target, None).backward()
        for flat in flats.values():
            flat.step(1e-2)
    return {name: {key: value.clone() for key, value in flat.state().items()} for name, flat in flats.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variants_do_not_see_one_another(dtype: torch.dtype) -> None:
    """D14: with others added, removed, perturbed and in another order, each has the same bits."""
    parts, runs = first_layer(teacher("llama", dtype))
    together = trained(parts, runs, VARIANTS)
    others = trained(parts, runs, VARIANTS[:0:-1])
    changed = trained(parts, runs, VARIANTS, perturbed=tuple(one.name for one in VARIANTS[1:]))
    for one in VARIANTS:
        is_same = [torch.equal(value, together[one.name][key]) for key, value in changed[one.name].items()]
        assert all(is_same) == (one is VARIANTS[0])
        for found in (trained(parts, runs, [one])[one.name], others.get(one.name, together[one.name])):
            assert all(torch.equal(value, together[one.name][key]) for key, value in found.items())


def test_one_that_is_not_finite_leaves_the_others_alone() -> None:
    """D25."""
    parts, runs = first_layer(teacher("llama", torch.bfloat16))
    alone = trained(parts, runs, VARIANTS[:1])
    device, spec = CpuDevice(), AdamW(betas=(0.9, 0.95), max_grad_norm=1.0, nonfinite="skip")
    scratch = new_scratch(device, spec)
    flats = [FlatModule(build_student(parts, one), spec, device, scratch) for one in VARIANTS[:2]]
    for _ in range(3):
        for one, flat in zip(VARIANTS, flats, strict=False):
            given = runs[one.learn]
            loss = nmse(flat.module(given), given.target, None)
            (loss * (torch.inf if flat is flats[1] else 1)).backward()
        assert [flat.step(1e-2).is_applied for flat in flats] == [True, False]
    assert all(torch.equal(value, alone["ffn-24"][key]) for key, value in flats[0].state().items())


def test_training_a_subblock_leaves_everything_else_as_it_is() -> None:
    """D18."""
    model = teacher("llama", torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts, runs = first_layer(model)
    device, spec = CpuDevice(), AdamW()
    made = build_student(parts, variant("intermediate_size", 24))
    flat = FlatModule(made, spec, device, new_scratch(device, spec))
    for _ in range(3):
        nmse(made(runs["ffn"]), runs["ffn"].target, None).backward()
        flat.step(1e-2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name.partition(".")[0] for name in made.layer_tensors()} == {"mlp", "post_attention_layernorm"}
    moved = made.layer_tensors()["post_attention_layernorm.weight"]
    assert not torch.equal(moved, parts.layer.post_attention_layernorm.weight)  # the norm in front is trained


@pytest.mark.parametrize("one", VARIANTS, ids=lambda one: one.name)
def test_memory_is_known_before(one: Variant) -> None:
    parts, _ = first_layer(teacher("llama", torch.bfloat16))
    spec = AdamW()
    made = build_student(parts, one)
    numels = {name: (param.numel(), param.dtype) for name, param in made.named_parameters()}
    assert flat_bytes(student_numels(parts, one), spec) == flat_bytes(numels, spec)
    elements = sum(count for count, _ in numels.values())
    assert 14 * elements <= flat_bytes(numels, spec) <= 14 * elements + 7 * 256 * len(numels) + 2**20


def test_training_reduces_the_loss() -> None:
    parts, runs = first_layer(teacher("llama", torch.bfloat16))
    device, spec = CpuDevice(), AdamW()
    for one in (VARIANTS[0], VARIANTS[1], BLOCK):
        made = build_student(parts, one)
        flat, losses, given = FlatModule(made, spec, device, new_scratch(device, spec)), [], runs[one.learn]
        for _ in range(20):
            loss = nmse(made(given), given.target, None)
            loss.backward()
            flat.step(3e-3)
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0], one.name
