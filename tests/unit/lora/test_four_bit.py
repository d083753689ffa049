"""Fused layers over bitsandbytes' 4-bit weights: the arithmetic of dequantized ones, and nothing dense is saved."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from unit.lora.test_fuse import LINEARS, Model, distance, inputs, names_of_fused, results, saved_units

import outsize
from outsize.compat import TorchDispatchMode

bitsandbytes = pytest.importorskip("bitsandbytes")
HIDDEN, MLP = 64, 128


def quantized(dtype: torch.dtype, *, double: bool = True, kind: str = "nf4", compute: Any = None, **config: Any) -> Any:
    torch.manual_seed(0)
    model = Model("biases", hidden=HIDDEN, mlp=MLP).to(dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                layer = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, compute_dtype=compute or dtype, compress_statistics=double,
                    quant_type=kind,
                )  # fmt: skip
                layer.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, compress_statistics=double, quant_type=kind
                )
                layer.bias = child.bias
                setattr(parent, name, layer.to("cpu"))
    model.requires_grad_(False).is_loaded_in_4bit = True  # type: ignore[assignment]
    inject_adapter_in_model(LoraConfig(**{"r": 4, "target_modules": LINEARS, **config}), model)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(dtype)
            if "lora_B" in name:
                param.data.normal_(std=0.1)
    return model.train()


def dense(model: Any) -> Any:
    """The same model with dequantized weights."""
    made = copy.deepcopy(model)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, bitsandbytes.nn.Linear4bit):
                weight = bitsandbytes.functional.dequantize_4bit(child.weight, child.weight.quant_state)
                layer = nn.Linear(child.in_features, child.out_features, dtype=weight.dtype)
                layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), child.bias
                setattr(parent, name, layer)
    return made


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_it_is_the_arithmetic_of_the_dequantized_weights(kind: str, double: bool, dropout: float) -> None:
    model = quantized(torch.float32, kind=kind, double=double, lora_dropout=dropout)
    x = inputs(torch.float32, hidden=HIDDEN)
    theirs = results(model, x)
    outsize.fuse_lora(model)
    assert names_of_fused(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "mlp"}
    assert sum(type(module).__name__ == "FusedLinear4bit" for module in model.modules()) == 7
    found = results(model, x)
    assert distance(found, theirs) < 1e-4
    exact = results(outsize.fuse_lora(dense(outsize.fuse_lora(copy.deepcopy(model), ()))), x)
    exact = {name.replace("_dense", ""): value for name, value in exact.items()}
    assert all(torch.equal(found[name], value) for name, value in exact.items() if "lora" in name or name in "xy")


def test_no_dense_weight_is_saved() -> None:
    tokens = 16
    model = outsize.fuse_lora(quantized(torch.bfloat16))
    x = inputs(torch.bfloat16, HIDDEN, tokens, rows=1)
    expected = outsize.fuse_lora(dense(outsize.fuse_lora(copy.deepcopy(model), ())))
    assert saved_units(model, x, tokens, HIDDEN) == saved_units(expected, x, tokens, HIDDEN)


def test_bf16_gradients_are_pefts_up_to_rounding() -> None:
    model = quantized(torch.bfloat16, lora_dropout=0.1)
    x = inputs(torch.bfloat16, hidden=HIDDEN)
    theirs = results(model, x)
    assert distance(results(outsize.fuse_lora(model), x), theirs) < 2e-2


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_without_grad_and_in_other_dtypes_bitsandbytes_computes(compute: Any) -> None:
    """It has kernels for few tokens, and casts the input to its own dtype."""
    model = quantized(torch.float32, compute=compute)
    x = inputs(torch.float32, hidden=HIDDEN)
    called: list[str] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func._schema.name)
            return func(*args, **kwargs or {})

    with torch.no_grad():
        theirs = model(x)
        with Operators():
            assert torch.equal(outsize.fuse_lora(model)(x), theirs)
    assert called.count("bitsandbytes::gemm_4bit") == 7
    if compute is not None:
        ours = results(model, x)
        theirs_too = results(outsize.fuse_lora(model, ()), x)
        assert all(torch.equal(ours[name], value) for name, value in theirs_too.items())


def test_merging_changes_the_packed_weight_and_is_followed() -> None:
    model = outsize.fuse_lora(quantized(torch.float32))
    layer: Any = model.layer.mlp.down_proj
    x: Tensor = torch.randn(3, MLP)
    before = layer(x)
    layer.merge()
    merged = layer(x)
    assert torch.equal(merged, layer.base_layer(x)) and not torch.equal(merged, before)
    layer.unmerge()
    torch.testing.assert_close(layer(x), before, rtol=0.5, atol=0.5)
    assert not torch.equal(layer(x), before)  # the weight has been quantized twice more
