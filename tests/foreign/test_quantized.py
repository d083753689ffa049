"""What other code does with a quantized base between steps of a prepared model: it reads the home of every part, or
raises; never the bytes of another layer.
"""

import copy
from collections.abc import Iterator
from typing import Any

import cells
import pytest
import quantized
import torch
from quantized import Quantized
from torch import Tensor, nn

import outsize
from outsize.base.errors import EngineMisuse, StaleParameter
from outsize.compat import without_dispatch_modes
from outsize.model.parts import lookup_tables, named_parts
from outsize.runtime.engine import Engine
from outsize.schedule.buffers import BufferKind as B

bnb = pytest.importorskip("bitsandbytes")

NF4, TORCHAO = Quantized(quantization="nf4-double"), Quantized(quantization="torchao-int8")


def streamed(case: Quantized, device: str = "cpu") -> Engine:
    """After one step, with slots full of NaN."""
    engine = cells.prepare_by_hand(
        case.model(),
        quantized.batch(),
        spec=case.spec,
        device=device,
        traced=quantized.traced(case),
        weights="host",
        optimizer="host",
        depth=0,
    )
    step(engine.model, engine.optimizer)
    with without_dispatch_modes():
        for (kind, index), buffer in engine.runtime.store.gpu.items():
            if kind == B.SLOT:
                buffer.fill_(0xFF)
                engine.runtime.store.slot_contents[index] = None
    return engine


@pytest.fixture
def nf4() -> Iterator[Engine]:
    with cells.closing(streamed(NF4)) as engine:
        yield engine


def step(model: nn.Module, optimizer: Any) -> float:
    torch.manual_seed(3)  # of dropout
    loss = model(**quantized.batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def dequantized(weight: Any) -> Tensor:
    if hasattr(weight, "dequantize") and not hasattr(weight, "quant_state"):
        return weight.dequantize()
    return bnb.functional.dequantize_4bit(weight, weight.quant_state)


def layer(model: nn.Module, index: int) -> Any:
    return model.get_submodule(f"base_model.model.model.layers.{index}")


@pytest.mark.parametrize("case", [NF4, TORCHAO], ids=lambda case: case.quantization)
@pytest.mark.parametrize("device", ["cpu", "sim:64MiB"])
def test_all_weights_of_a_streamed_base_can_be_read_between_steps(case: Quantized, device: str) -> None:
    given = case.model()
    with cells.closing(streamed(case, device)) as engine:
        for found, wanted in zip(quantized.weights_of(engine.model), quantized.weights_of(given), strict=True):
            assert torch.equal(dequantized(found), dequantized(wanted))
            assert torch.equal(dequantized(copy.deepcopy(found)), dequantized(wanted))
        parts = dict(named_parts(given))
        for name, part in named_parts(engine.model):
            if not part.requires_grad:
                assert torch.equal(part, parts[name]) and torch.equal(copy.deepcopy(part), parts[name]), name
                assert type(copy.deepcopy(part)) is type(parts[name])
    assert all(type(part) is type(parts[name]) for name, part in named_parts(engine.model))


def test_state_dict_has_the_files_of_the_base(nf4: Engine) -> None:
    given, found = layer(NF4.model(), 2).state_dict(), layer(nf4.model, 2).state_dict()
    assert given.keys() == found.keys() and any(key.endswith("quant_state.bitsandbytes__nf4") for key in given)
    for key, value in given.items():
        assert "lora" in key or torch.equal(found[key], value), key


def test_a_write_to_a_scale_reaches_the_next_forward(nf4: Engine) -> None:
    plain = NF4.model()
    reference = cells.Reference(
        NF4.spec.param_groups(plain.named_parameters()), lr=1e-2, weight_decay=0.1, max_grad_norm=cells.MAX_GRAD_NORM
    )
    step(plain, reference)
    unscaled = float(plain(**quantized.batch()).loss.detach())
    for model in (plain, nf4.model):
        layer(model, 1).mlp.up_proj.base_layer.weight.quant_state.state2.absmax.mul_(0.5)
    assert step(nf4.model, nf4.optimizer) == step(plain, reference) != unscaled


@pytest.mark.parametrize("part", ["absmax", "nested_absmax", "nested_offset"])
def test_a_scale_of_another_layer_is_refused_in_a_forward(nf4: Engine, part: str) -> None:
    first = layer(nf4.model, 0).mlp.up_proj.base_layer.weight
    layer(nf4.model, 3).register_forward_pre_hook(lambda module, args: getattr(first, part) + 1)
    with pytest.raises(StaleParameter, match=rf"reads .*layers\.0\.mlp\.up_proj\.base_layer\.weight\.{part}"):
        nf4.model(**quantized.batch())


@pytest.mark.parametrize("attribute", ["absmax", "offset"])
def test_an_exchanged_part_is_refused_by_name(nf4: Engine, attribute: str) -> None:
    state = layer(nf4.model, 0).mlp.up_proj.base_layer.weight.quant_state
    given = getattr(state, attribute)
    setattr(state, attribute, given.clone())
    with pytest.raises(EngineMisuse, match=rf"layers\.0\.mlp\.up_proj\.base_layer\.weight\..*{attribute} is not the"):
        nf4.model(**quantized.batch())
    setattr(state, attribute, given)


def test_a_write_to_a_weight_of_several_tensors_is_refused() -> None:
    with cells.closing(streamed(TORCHAO)) as engine:
        weight = layer(engine.model, 0).mlp.up_proj.base_layer.weight
        with pytest.raises(EngineMisuse, match=r"up_proj\.base_layer\.weight: a quantized weight that consists of"):
            weight.copy_(weight)
        with pytest.raises(EngineMisuse, match=r"up_proj\.base_layer\.weight: a quantized weight that consists of"):
            weight.data = weight


def test_lookup_tables_are_one_copy_while_prepared() -> None:
    model = NF4.model()
    for table in lookup_tables(model):
        table.replace(table.tensor.clone())  # as read from files, where each weight has its own
    own = [id(table.tensor) for table in lookup_tables(model)]
    assert len(set(own)) == 2 * 7 * quantized.CONFIG.num_hidden_layers
    engine = outsize.prepare(model, quantized.batch(), optimizer=NF4.spec, device="sim:64MiB")
    shared = {table.tensor.data_ptr() for table in lookup_tables(model)}
    assert len(shared) == 2, "NF4's values, and those of 8-bit scales"
    assert engine.graph.buffer_bytes == sum(b.nbytes for b in model.buffers()) + 4 * (16 + 256)
    engine.detach()
    assert [id(table.tensor) for table in lookup_tables(model)] == own


def test_parameters_are_counted_as_weights(nf4: Engine) -> None:
    """Packed bytes hold two weights each; scales are none."""
    assert (
        nf4.graph.num_params == sum(p.numel() for p in quantized.unquantized().parameters()) + nf4.graph.num_trainable
    )


def test_steps_increment_the_versions_of_what_they_update(nf4: Engine) -> None:
    """Other libraries key caches on them (the norms of DoRA in Axolotl)."""
    before = {name: param._version for name, param in nf4.model.named_parameters()}
    step(nf4.model, nf4.optimizer)
    changed = {name for name, param in nf4.model.named_parameters() if param._version != before[name]}
    assert changed == {name for name, param in nf4.model.named_parameters() if param.requires_grad}


def test_evaluation_does_not_repack_weights_while_prepared() -> None:
    """bitsandbytes does so on CPUs with AVX512-BF16."""
    model = NF4.model()
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    for linear in linears:
        linear.support_avx512bf16_for_cpu = True
    engine = outsize.prepare(model, quantized.batch(), optimizer=NF4.spec, device="cpu")
    with cells.closing(engine):
        wanted = quantized.evaluate(NF4.model())
        assert quantized.evaluate(model) == wanted
        assert not engine.runtime.store.replaced_data() and engine.runtime.store.replaced() is None
    assert all(linear.support_avx512bf16_for_cpu for linear in linears)
