"""The tensors in which weights are stored: parameters, and what quantization attaches to them."""

from typing import Any

import pytest
import torch
from torch import nn

from outsize.compat import without_torch_function
from outsize.model.parts import (
    attachments,
    distinct_tables,
    lookup_tables,
    named_parts,
    own_parts,
    parts,
    rewrapped,
    share_tables,
    wrappers,
)

bnb = pytest.importorskip("bitsandbytes")


def linear4bit(**how: Any) -> nn.Module:
    return bnb.nn.Linear4bit(64, 96, **{"bias": True, "compute_dtype": torch.bfloat16, "quant_type": "nf4"} | how).to(
        "cpu"
    )


def facts(module: nn.Module) -> list[tuple[str, tuple[int, ...], str, int]]:
    return [(p.name, tuple(p.tensor.shape), str(p.tensor.dtype)[6:], p.num_weights) for p in parts(module)]


def test_plain_parameters_are_the_parts_of_an_unquantized_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(named_parts(model)) == list(model.named_parameters())
    everything = list(named_parts(model, remove_duplicate=False))
    assert everything == list(model.named_parameters(remove_duplicate=False)) and len(everything) == 4
    assert not list(lookup_tables(model)) and not list(attachments(model)) and not list(wrappers(model))


def test_a_4_bit_weight_has_its_scales_and_the_scales_of_these() -> None:
    assert facts(linear4bit()) == [
        ("weight", (3072, 1), "uint8", 64 * 96),
        ("weight.absmax", (96,), "uint8", 0),
        ("weight.nested_absmax", (1,), "float32", 0),
        ("weight.nested_offset", (), "float32", 0),
        ("bias", (96,), "float32", 96),
    ]
    assert facts(linear4bit(compress_statistics=False, bias=False)) == [
        ("weight", (3072, 1), "uint8", 64 * 96),
        ("weight.absmax", (96,), "float32", 0),
    ]
    stored = linear4bit(quant_storage=torch.bfloat16, bias=False)
    assert facts(stored)[0] == ("weight", (1536, 1), "bfloat16", 64 * 96)


def test_names_are_those_of_files() -> None:
    model = nn.Sequential(linear4bit())
    names = {name for name, _ in named_parts(model)} - {"0.weight.nested_offset"}  # in files, a number in JSON
    assert names <= model.state_dict().keys()
    assert [name for name, _ in own_parts(model[0])] == [name for name, _ in named_parts(model[0])]
    assert not list(own_parts(model))


def test_an_8_bit_weight_has_its_scales_before_and_after_the_first_forward() -> None:
    model = nn.Sequential(bnb.nn.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False).to("cpu"))
    wanted = [("0.weight", (96, 64), "int8", 64 * 96), ("0.SCB", (96,), "float32", 0)]
    assert facts(model) == wanted
    model(torch.ones(2, 64, dtype=torch.float16))
    assert facts(model) == wanted and {name for name, _ in named_parts(model)} <= model.state_dict().keys()


def test_a_weight_of_several_tensors_is_its_inner_tensors() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 96, bias=False)).to(torch.bfloat16).requires_grad_(False)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert facts(model)[:2] == [
        ("0.weight.qdata", (96, 64), "int8", 96 * 64),
        ("0.weight.scale", (96, 1), "float32", 0),
    ]
    ((name, weight, inner),) = wrappers(model)
    assert name == "0.weight" and {part.name for part in inner} == {n for n, _ in named_parts(model)}
    with without_torch_function():
        made = rewrapped(weight, lambda part: part * 2 if part.is_floating_point() else part)
    assert type(made) is type(weight) and torch.equal(made.dequantize(), weight.dequantize() * 2)


def test_a_scale_inverse_of_fp8_is_a_parameter_that_counts_no_weights() -> None:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight_scale_inv = nn.Parameter(torch.ones(1, 1))
    assert facts(linear) == [("weight", (4, 4), "float32", 16), ("weight_scale_inv", (1, 1), "float32", 0)]


def test_a_part_that_two_weights_share_is_listed_once() -> None:
    model = nn.Sequential(linear4bit(bias=False), linear4bit(bias=False))
    model[1].weight.quant_state = model[0].weight.quant_state
    names = [name for name, _ in named_parts(model)]
    assert [name for name in names if name.startswith("1.")] == ["1.weight"]


def test_lookup_tables_with_equal_values_become_one() -> None:
    model = nn.Sequential(linear4bit(), linear4bit(), linear4bit(quant_type="fp4", compress_statistics=False))
    for table in lookup_tables(model):
        table.replace(table.tensor.clone())
    given = [table.tensor for table in lookup_tables(model)]
    assert len(given) == 5 and len(distinct_tables(model)) == 3, "NF4, FP4 and the code of 8-bit scales"
    copies, restore = share_tables(model, torch.clone)
    assert len(copies) == 3
    assert {id(table.tensor) for table in lookup_tables(model)} == {id(copy) for copy in copies}
    assert all(torch.equal(a.tensor, b) for a, b in zip(lookup_tables(model), given, strict=True))
    restore()
    assert all(a.tensor is b for a, b in zip(lookup_tables(model), given, strict=True))
