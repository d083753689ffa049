"""A module over tiles against the same module on each tile in plain torch, and against the untiled one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

from outsize.activation.recompute import run_checkpointed
from outsize.activation.tiles import Tiling, run_in_tiles
from outsize.base.errors import EngineMisuse
from outsize.model.discover import find_layers

TOKENS, TILE = 20, 6


def llama_mlp() -> nn.Module:
    return LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2))


def gpt2_mlp() -> nn.Module:
    return GPT2MLP(40, GPT2Config(n_embd=16, resid_pdrop=0.3))


def experts() -> nn.Module:
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, num_attention_heads=2)
    block = MixtralSparseMoeBlock(config)
    for param in block.parameters():
        nn.init.normal_(param, std=0.1)
    return block


MODULES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama_mlp,
    "norm": lambda: LlamaRMSNorm(16),
    "gpt2": gpt2_mlp,
    "experts": experts,
}


def made(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().to(dtype)


def gradients(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of the input and the parameters."""
    torch.manual_seed(1)
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return y.detach(), found | ({"x": x.grad} if x.grad is not None else {})


def tile_by_tile(module: nn.Module, x: Tensor, dim: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """What `gradients` gives, from a backward of each tile and sums in fp32."""
    torch.manual_seed(1)
    names, params = zip(*((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True)
    parts = [part.detach().contiguous().requires_grad_(x.requires_grad) for part in x.split(TILE, dim)]
    outputs = [module(part) for part in parts]
    y = torch.cat([output.detach() for output in outputs], dim)
    weights = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype).split(TILE, dim)
    sums: dict[str, Tensor] = {}
    given: list[Tensor] = []
    for part, output, grad in zip(parts, outputs, weights, strict=True):
        wanted = [*params, *([part] if x.requires_grad else [])]
        found = torch.autograd.grad(output, wanted, grad.contiguous(), allow_unused=True)
        for name, one in zip(names, found, strict=False):
            if one is not None:
                sums[name] = sums[name] + one if name in sums else one.float()
        given += found[len(params) :]
    result = {name: total.to(module.get_parameter(name).dtype) for name, total in sums.items()}
    return y, result | ({"x": torch.cat(given, dim)} if given else {})


def over_tiles(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return gradients(lambda x: run_in_tiles(module, module.forward, x, TILE), module, x)


def assert_same(one: tuple[Tensor, dict[str, Tensor]], two: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(one[0], two[0]) and one[1].keys() == two[1].keys()
    for name, value in two[1].items():
        assert one[1][name].dtype == value.dtype and torch.equal(one[1][name], value), name


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_tiles_compute_what_torch_computes_of_each_tile(name: str, dtype: torch.dtype) -> None:
    """Dropout in a recomputed tile draws what its forward drew."""
    module = made(name, dtype)
    x = torch.randn(2, TOKENS, 16).to(dtype).requires_grad_()
    wanted = tile_by_tile(module, x)
    state = torch.get_rng_state()
    assert_same(over_tiles(module, x), wanted)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-7), (torch.bfloat16, 4e-3)], ids=str)
@pytest.mark.parametrize("name", ["llama", "norm", "experts"])
def test_tiles_are_near_the_untiled_module(name: str, dtype: torch.dtype, bound: float) -> None:
    module = made(name, dtype)
    x = torch.randn(2, TOKENS, 16).to(dtype).requires_grad_()
    wanted_y, wanted = gradients(module, module, x)
    y, found = over_tiles(module, x)
    assert error(y, wanted_y) < bound
    for key, value in wanted.items():
        assert error(found[key], value) < bound, key


def test_sums_over_tiles_are_in_fp32() -> None:
    """In bf16, 256 + 1 is 256: ones after a first large gradient would be lost."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity()).to(torch.bfloat16)
    x = torch.ones(1, 65, 1, dtype=torch.bfloat16)
    x[0, 0] = 256
    module.zero_grad()
    run_in_tiles(module, module.forward, x.requires_grad_(), 1).sum().backward()
    assert module[0].weight.grad.item() == 320


def test_tokens_may_be_another_dimension_than_the_second() -> None:
    """q and k norms of some models get heads before tokens, as a view."""
    norm = made("norm", torch.float32)
    x = torch.randn(2, TOKENS, 3, 16).transpose(1, 2)
    found = over_tiles(norm, x.requires_grad_())
    assert_same(found, tile_by_tile(norm, x, 2))
    assert found[0].stride() == x.stride()


@pytest.mark.parametrize("frozen", ["input", "some", "all"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    module = made("llama", torch.float32)
    x = torch.randn(1, TOKENS, 16).requires_grad_(frozen != "input")
    module.gate_proj.requires_grad_(frozen == "input")
    if frozen == "all":
        module.requires_grad_(False)
    if frozen == "all":
        found = over_tiles(module, x)[1]
        assert found.keys() == {"x"} and torch.equal(found["x"], tile_by_tile(made("llama", x.dtype), x)[1]["x"])
    else:
        assert_same(over_tiles(module, x), tile_by_tile(module, x))


def test_without_grad_no_graph_is_made_and_the_bits_are_the_same() -> None:
    module = made("llama", torch.float32)
    x = torch.randn(1, TOKENS, 16)
    with_grad = run_in_tiles(module, module.forward, x, TILE)
    with torch.no_grad():
        without = run_in_tiles(module, module.forward, x, TILE)
    assert without.grad_fn is None and torch.equal(with_grad, without)


def test_autocast_is_that_of_the_forward() -> None:
    module = made("llama", torch.float32)
    x = torch.randn(1, TOKENS, 16, requires_grad=True)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = run_in_tiles(module, module.forward, x, TILE)
        wanted = torch.cat([module(part) for part in x.split(TILE, 1)], 1)
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)
    params = [x, *module.parameters()]
    found, expected = (torch.autograd.grad(out.float().square().sum(), params) for out in (y, wanted))
    assert torch.equal(found[0], expected[0])
    for one, two in zip(found, expected, strict=True):
        assert error(one, two) < 2e-7


def test_hooks_of_parameters_run_once_with_the_whole_gradient() -> None:
    module = made("llama", torch.float32)
    seen: list[str] = []

    def double(grad: Tensor) -> Tensor:
        seen.append("gradient")
        return 2 * grad

    x = torch.randn(1, TOKENS, 16, requires_grad=True)
    _, wanted = tile_by_tile(module, x)
    module.gate_proj.weight.register_hook(double)
    module.gate_proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    _, found = over_tiles(module, x)
    assert seen == ["gradient", "accumulated"]
    assert torch.equal(found["gate_proj.weight"], 2 * wanted["gate_proj.weight"])


def test_a_recomputed_layer_runs_its_last_tiled_module_twice_and_its_norm_three_times() -> None:
    model = zoo.make("llama")
    layer = find_layers(model)[0].module
    tokens = {"mlp": 0, "norm": 0}

    def counting(name: str, forward: Callable[[Tensor], Tensor]) -> Any:
        def run(x: Tensor) -> Tensor:
            tokens[name] += x.shape[1]
            return forward(x)

        return run

    layer.mlp.gate_proj.forward = counting("mlp", layer.mlp.gate_proj.forward)
    layer.input_layernorm.forward = counting("norm", layer.input_layernorm.forward)
    x = torch.randn(1, TOKENS, zoo.HIDDEN, requires_grad=True)
    positions = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
    tiling = Tiling(layer, TILE, ["mlp", "input_layernorm"])
    for attach, norm in ((False, 2), (True, 3)):
        tokens.update(mlp=0, norm=0)
        if attach:
            tiling.attach()
        out = run_checkpointed(lambda: layer(x, position_embeddings=positions), x.device)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert tokens == {"mlp": 2 * TOKENS, "norm": norm * TOKENS}
    tiling.detach()
    assert "forward" not in vars(layer.mlp)


def test_only_long_rows_are_cut_and_only_without_hooks_inside() -> None:
    module = nn.ModuleDict({"mlp": made("llama", torch.float32)})
    lengths: list[int] = []
    mlp: Any = module["mlp"]
    forward = mlp.act_fn.forward
    mlp.act_fn.forward = lambda x: (lengths.append(x.shape[1]), forward(x))[1]
    tiling = Tiling(module, TILE, ["mlp"])
    tiling.attach()
    mlp(torch.randn(1, 2 * TILE, 16))
    assert lengths == [2 * TILE]
    lengths.clear()
    mlp(torch.randn(1, 2 * TILE + 1, 16))
    assert lengths == [TILE, TILE, 1]
    lengths.clear()
    recorded: list[Tensor] = []
    handle = mlp.gate_proj.register_forward_hook(lambda module, args, out: recorded.append(out))
    mlp(torch.randn(1, TOKENS, 16))
    assert lengths == [TOKENS] and recorded[0].requires_grad
    handle.remove()
    tiling.detach()


def test_a_second_derivative_is_refused() -> None:
    module = made("llama", torch.float32)
    x = torch.randn(1, TOKENS, 16, requires_grad=True)
    with pytest.raises(EngineMisuse, match="tile_tokens=0"):
        torch.autograd.grad(run_in_tiles(module, module.forward, x, TILE).sum(), x, create_graph=True)
