"""Fused LoRA layers compute what PEFT computes, save less, and give way to PEFT's forward in every other state."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import outsize
from outsize.base.errors import ConfigError
from outsize.compat import TorchDispatchMode
from outsize.lora.fuse import Part

HIDDEN, MLP, TOKENS = 32, 48, 12
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Model(nn.Module):
    """One layer."""

    def __init__(self, kind: str = "llama", *, hidden: int = HIDDEN, mlp: int = MLP, heads: int = 4, kv: int = 2):
        super().__init__()
        sizes: dict[str, Any] = dict(
            hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=1, num_attention_heads=heads,
            num_key_value_heads=kv, head_dim=hidden // heads, vocab_size=64, attn_implementation="sdpa",
        )  # fmt: skip
        if kind == "gemma2":
            self.layer: nn.Module = Gemma2DecoderLayer(Gemma2Config(**sizes | {"attn_implementation": "eager"}), 0)
        else:
            biases = dict(attention_bias=kind == "biases", mlp_bias=kind == "biases")
            self.layer = LlamaDecoderLayer(LlamaConfig(**sizes, **biases), 0)
        # The rotary table of LlamaConfig: both kinds have the same heads.
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        out = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return out[0] if isinstance(out, tuple) else out


def adapted(
    kind: str = "llama", dtype: torch.dtype = torch.float64, adapter: torch.dtype | None = None, **config: Any
) -> Any:
    sizes = {key: config.pop(key) for key in ("hidden", "mlp", "heads", "kv") if key in config}
    torch.manual_seed(0)
    model = Model(kind, **sizes).to(dtype).requires_grad_(False)
    settings = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **config})
    inject_adapter_in_model(settings, model)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(adapter or dtype)
            if "lora_B" in name:  # fresh ones are zero
                param.data.normal_(std=0.1)
    return model.train()


def inputs(dtype: torch.dtype = torch.float64, hidden: int = HIDDEN, tokens: int = TOKENS, rows: int = 2) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(rows, tokens, hidden, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()


def results(model: nn.Module, x: Tensor, *, forward: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Output and gradients."""
    torch.manual_seed(2)
    model.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = (forward or model)(x)
    weights = torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype, device=y.device)
    (y * weights).sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    grads |= {"x": x.grad} if x.grad is not None else {}
    return {"y": y.detach(), **grads, "drawn": torch.rand(1, device=y.device)}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and torch.equal(found["drawn"], expected["drawn"])
    assert all(found[name].dtype == value.dtype for name, value in expected.items())
    return max(float((found[name] - value).double().norm() / value.double().norm()) for name, value in expected.items())


def fused(model: Any, parts: tuple[Part, ...] = ("mlp", "qkv", "o")) -> Any:
    return outsize.fuse_lora(copy.deepcopy(model), parts)


def names_of_fused(model: nn.Module) -> set[str]:
    return {
        name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__.startswith("Fused")
    }


# --- the same numbers


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "biases"])
def test_gradients_equal_pefts_in_double_precision(kind: str, dropout: float) -> None:
    model = adapted(kind, lora_dropout=dropout)
    both = fused(model)
    assert names_of_fused(both) == {*LINEARS, "mlp"}
    expected = results(model, inputs())
    assert distance(results(both, inputs()), expected) < 1e-10
    assert len(expected) == 2 * 7 + 3 and all(value.any() for value in expected.values())


@pytest.mark.parametrize(
    "config", [dict(use_rslora=True), dict(lora_dropout=0.3, use_rslora=True, r=1)], ids=["plain", "dropout"]
)
def test_a_projection_equals_its_formula_in_double_precision(config: dict[str, Any]) -> None:
    model = adapted("biases", **config)
    layer: Any = model.layer.self_attn.o_proj
    a, b, base = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer
    scaling = 8 / config.get("r", 4) ** 0.5

    def formula(x: Tensor) -> Tensor:
        low = F.dropout(x, config.get("lora_dropout", 0.0)) @ a.T
        return x @ base.weight.T + base.bias + scaling * low @ b.T

    found = results(layer, inputs(), forward=outsize.fuse_lora(model).layer.self_attn.o_proj)
    assert distance(found, results(layer, inputs(), forward=formula)) < 1e-10


def test_gradients_equal_pefts_up_to_rounding_in_bf16() -> None:
    for dropout in (0.0, 0.1):
        sizes: dict[str, Any] = dict(hidden=128, mlp=256, r=8, lora_dropout=dropout)
        model = adapted(dtype=torch.bfloat16, **sizes)
        exact = results(adapted(dtype=torch.float64, **sizes).to(torch.float64), inputs(hidden=128))
        x = inputs(torch.bfloat16, hidden=128)
        ours, theirs = results(fused(model), x), results(model, x)
        assert distance(ours, theirs) < 2e-2
        if not dropout:  # both are as far from exact arithmetic; its weights are not rounded
            far = [max(float((r[n].double() - v).norm() / v.norm()) for n, v in exact.items()) for r in (ours, theirs)]
            assert far[0] < 1.1 * far[1]


def under_autocast(model: nn.Module) -> dict[str, Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return results(model, inputs(torch.float32), forward=forward)


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_products_are_computed_in_its_dtype(adapter: torch.dtype) -> None:
    model = adapted(dtype=torch.float32, adapter=adapter)
    both = fused(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.layer.mlp(inputs(torch.float32))
        found = both.layer.mlp(inputs(torch.float32))
    assert found.dtype == expected.dtype == torch.bfloat16 and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
    assert distance(under_autocast(both), under_autocast(model)) < 3e-2


def test_under_autocast_masks_of_another_dtype_are_left_to_peft() -> None:
    """Which elements a GPU drops depends on the dtype."""
    for adapter in (torch.float32, torch.bfloat16):
        model = adapted(dtype=torch.float32, adapter=adapter, lora_dropout=0.3)
        gap = distance(under_autocast(fused(model)), under_autocast(model))
        assert gap == 0 if adapter == torch.float32 else 0 < gap < 3e-2
    model = adapted(dtype=torch.float64)  # autocast leaves fp64 as it is
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(model)(inputs()).dtype == torch.float64


def test_inputs_of_every_shape() -> None:
    model = adapted(lora_dropout=0.3)
    both = fused(model)
    for shape in ((HIDDEN,), (5, HIDDEN), (0, HIDDEN), (2, 3, 4, HIDDEN)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for path in ("self_attn.q_proj", "mlp"):
            found, expected = (results(m, x, forward=m.layer.get_submodule(path)) for m in (both, model))
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name], value, rtol=1e-10) for name, value in expected.items())
    x = torch.randn(6, 5, HIDDEN, dtype=torch.float64).transpose(0, 1).requires_grad_()  # masks follow the memory
    found, expected = (results(m, x, forward=m.layer.self_attn.q_proj) for m in (both, model))
    assert distance(found, expected) < 1e-10


@pytest.mark.parametrize("trained", ["lora_A", "lora_B", "up_proj", "gate_proj.lora_B", "nothing"])
@pytest.mark.parametrize("needs_input", [True, False])
def test_only_gradients_that_are_wanted_are_computed(trained: str, needs_input: bool) -> None:
    if trained == "nothing" and not needs_input:
        return
    model = adapted(lora_dropout=0.1)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name and trained in name)
    x = inputs().requires_grad_(needs_input)
    expected = results(model, x, forward=model.layer.mlp)
    both = fused(model)
    assert distance(results(both, x, forward=both.layer.mlp), expected) < 1e-10


def test_outputs_may_be_written_to_and_backward_may_run_twice() -> None:
    model = adapted()
    both = fused(model)

    def scaled(m: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: m.layer.mlp(x).mul_(2) + m.layer.self_attn.q_proj(x).add_(1)

    assert (
        distance(results(both, inputs(), forward=scaled(both)), results(model, inputs(), forward=scaled(model))) < 1e-10
    )
    x = inputs()
    loss = both(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    (grad,) = torch.autograd.grad(both(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_adapter_that_changes_between_forward_and_backward_is_noticed() -> None:
    model = fused(adapted())
    for path in ("self_attn.q_proj", "mlp.down_proj"):
        loss = model(inputs()).sum()
        with torch.no_grad():
            model.layer.get_submodule(path).lora_A["default"].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_evaluation_has_the_values_of_training_and_draws_no_masks() -> None:
    model = adapted(lora_dropout=0.3)
    both = fused(model).eval()
    with torch.no_grad():
        without = both(inputs())
    assert torch.equal(without, both(inputs()))
    torch.testing.assert_close(without, model.eval()(inputs()), rtol=1e-10, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_draws_the_same_masks(dropout: float) -> None:
    model = fused(adapted(lora_dropout=dropout))
    expected = results(model, inputs())
    for reentrant in (False, True):
        found = results(model, inputs(), forward=partial(checkpoint, model, use_reentrant=reentrant))
        assert all(torch.equal(found[name], value) for name, value in expected.items()), reentrant


# --- what is saved


def saved_units(model: nn.Module, x: Tensor, tokens: int, hidden: int) -> float:
    """Bytes that one layer saves beside its input, in tokens × hidden × 2 bytes."""
    positions = model.rotary(x, torch.arange(tokens)[None])  # type: ignore[operator]
    own = {t.untyped_storage().data_ptr() for t in (x, *positions, *model.parameters())}
    seen: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layer(x, position_embeddings=positions)  # type: ignore[operator]
    return sum(num_bytes for num_bytes, _ in seen.values()) / (tokens * hidden * 2)


SAVED = [
    # adapters, dropout, fused: PEFT, each projection, gated MLPs too
    (torch.float32, 0.0, "peft", 37.0),
    (torch.float32, 0.05, "peft", 56.0),
    (torch.bfloat16, 0.0, "peft", 23.0),
    (torch.bfloat16, 0.05, "peft", 36.5),
    (torch.bfloat16, 0.0, "projections", 22.6),
    (torch.bfloat16, 0.05, "projections", 22.6),
    (torch.bfloat16, 0.0, "all", 15.6),
    (torch.bfloat16, 0.05, "all", 15.6),
]


@pytest.mark.parametrize(("adapter", "dropout", "what", "units"), SAVED)
def test_saved_bytes_are_those_of_the_docs(adapter: torch.dtype, dropout: float, what: str, units: float) -> None:
    """The table in docs/lora.md: widths of an 8B Llama divided by 16."""
    hidden, tokens = 256, 512
    sizes: dict[str, Any] = dict(hidden=hidden, mlp=896, heads=8, kv=2, r=16)
    model = adapted(dtype=torch.bfloat16, adapter=adapter, lora_dropout=dropout, **sizes)
    if what != "peft":
        outsize.fuse_lora(model)
    if what == "projections":
        model.layer.mlp.gate_proj.register_forward_hook(lambda *_: None)  # the MLP must call its parts
    x = inputs(torch.bfloat16, hidden, tokens, rows=1)
    assert round(saved_units(model, x, tokens, hidden), 1) == units


def test_recomputation_ends_before_the_down_projection() -> None:
    """Its output is not needed: two of three products of the MLP run again."""

    class Products(TorchDispatchMode):
        found: list[tuple[int, ...]]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs or {})
            if func is torch.ops.aten.mm.default and MLP in (*args[0].shape, *args[1].shape):
                self.found.append(tuple(out.shape))
            return out

    model = fused(adapted())
    x = inputs()
    products = Products()
    products.found = []
    y = checkpoint(model, x, use_reentrant=False)
    with products:
        model.layer.mlp(inputs())
        once, products.found = products.found, []
        y.sum().backward()
        both, products.found = products.found, []
        model(x).sum().backward()
    base = 2 * TOKENS, MLP
    assert once.count(base) == 2 and both.count(base) == 2 + 1  # and dy W of down
    again = len(both) - (len(products.found) - len(once))
    assert again == len(once) - 2  # neither down's base nor its x Aᵀ


# --- other states


def change_state(change: str, model: Any) -> None:
    """Change the state of all LoRA layers."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        if change == "disabled":
            layer.enable_adapters(False)
        elif change == "merged":
            layer.merge()
        elif change == "unmerged":
            layer.merge()
            layer.unmerge()
        elif change == "scaled":
            layer.scale_layer(0.5)
        elif change in ("two", "other"):
            config = LoraConfig(r=2, lora_alpha=3, target_modules=LINEARS)
            layer.update_layer("other", 2, 3, config=config)
            layer.to(torch.float64)
            nn.init.normal_(layer.lora_B["other"].weight)
            layer.set_adapter(["default", "other"] if change == "two" else ["other"])
        elif change == "hook":
            layer.lora_A["default"].register_forward_hook(lambda module, args, out: 2 * out)
        elif change == "outer hook":
            layer.register_forward_hook(lambda module, args, out: 2 * out)
        elif change == "bias":
            layer.base_layer.bias = nn.Parameter(torch.ones(layer.out_features, dtype=torch.float64))
        elif change == "base":
            layer.base_layer.weight.requires_grad_()
        elif change == "replaced":
            layer.base_layer.forward = lambda x, layer=layer: x @ layer.base_layer.weight.T + 1
        elif change == "dropout":
            layer.lora_dropout["default"] = nn.AlphaDropout(0.5)


@pytest.mark.parametrize(
    "change",
    ["disabled", "merged", "unmerged", "scaled", "two", "other", "hook", "outer hook", "bias", "base", "replaced",
     "dropout"],
)  # fmt: skip
def test_every_state_of_a_fused_layer_computes_what_peft_computes(change: str) -> None:
    model = adapted()
    both = fused(model)
    torch.manual_seed(3)
    change_state(change, model)
    torch.manual_seed(3)
    change_state(change, both)
    assert distance(results(both, inputs()), results(model, inputs())) < 1e-10


@pytest.mark.parametrize(
    "config",
    [
        dict(use_dora=True),
        dict(lora_bias=True),
        dict(target_modules=["q_proj", "down_proj"]),
        dict(target_modules=["gate_proj", "up_proj", "down_proj"], rank_pattern={"up_proj": 2}),
    ],
    ids=["dora", "biases of adapters", "some", "ranks"],
)
def test_other_adapters(config: dict[str, Any]) -> None:
    model = adapted("biases", **config)
    assert distance(results(fused(model), inputs()), results(model, inputs())) < 1e-10


def test_frozen_adapters_save_no_more_than_with_peft() -> None:
    model = adapted(dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name and "q_proj" in name)
    x = inputs(torch.bfloat16, rows=1)
    units = [saved_units(which, x, TOKENS, HIDDEN) for which in (fused(model), model)]
    assert units[0] < units[1]  # by q_proj, which is trained
    model.requires_grad_(False)
    assert saved_units(fused(model), x, TOKENS, HIDDEN) == saved_units(model, x, TOKENS, HIDDEN)


def test_adapters_in_another_dtype_keep_pefts_forward() -> None:
    model = adapted(dtype=torch.bfloat16, adapter=torch.float32)
    x = inputs(torch.bfloat16)
    assert distance(results(fused(model), x), results(model, x)) == 0


def test_arguments_that_only_pefts_forward_knows() -> None:
    model = fused(adapted())
    layer = model.layer.self_attn.q_proj
    base = layer(inputs(), adapter_names=["__base__", "default"])
    assert torch.equal(base[0], layer.base_layer(inputs())[0])
    torch.testing.assert_close(base[1], layer(inputs())[1], rtol=1e-10, atol=0)


def test_transforms_of_torch_func_run_pefts_forward() -> None:
    model = adapted()
    grads = [torch.func.grad(lambda x, m=m: m(x).sum())(inputs().detach()) for m in (model, fused(model))]
    assert torch.equal(*grads)


def test_weights_that_are_exchanged_for_a_call_are_those_of_its_backward() -> None:
    model = fused(adapted())
    expected = results(model, inputs())
    others = {name: param.detach().clone() for name, param in model.named_parameters()}
    x = inputs()
    y = torch.func.functional_call(model, others, (x,))
    for param in model.parameters():
        param.data.zero_()
    (y * torch.linspace(0.5, 1.5, HIDDEN, dtype=y.dtype)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected["x"])


def peft_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(12).view(2, 6)).logits


def test_a_fused_model_is_a_peft_model(tmp_path: Any) -> None:
    model = peft_model()
    both = outsize.fuse_lora(copy.deepcopy(model))
    assert list(both.state_dict()) == list(model.state_dict())
    for which, name in ((both, "ours"), (model, "theirs")):
        which.save_pretrained(tmp_path / name)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("ours", "theirs")]
    assert files[0] == files[1]
    base = peft_model().unload()
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "ours")), logits(model))
    for which in (both, model):
        with which.disable_adapter():
            assert torch.equal(logits(which), logits(peft_model().unload()))
    torch.testing.assert_close(logits(both), logits(model))
    for which in (both, model):
        torch.manual_seed(1)
        which.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        which.set_adapter("other")
    torch.testing.assert_close(logits(both), logits(model))
    assert not torch.allclose(logits(both), logits(peft_model()), rtol=1e-3)
    for which in (both, model):
        which.set_adapter("default")
        which.delete_adapter("other")
    torch.testing.assert_close(logits(both), logits(peft_model()))
    for which in (both, model):
        which.merge_adapter()
    assert torch.equal(logits(both), logits(model))
    for which in (both, model):
        which.unmerge_adapter()
    torch.testing.assert_close(logits(both), logits(model))
    assert torch.equal(logits(both.merge_and_unload()), logits(model.merge_and_unload()))


def test_a_fused_model_is_copied_pickled_and_restored() -> None:
    model = peft_model()
    before = [type(module) for module in model.modules()]
    expected = logits(outsize.fuse_lora(model))
    assert outsize.fuse_lora(model) is model  # again
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(logits(copied), expected)
        layer = copied.base_model.model.model.layers[0]
        layer.mlp.up_proj.base_layer.weight.data.zero_()
        assert not torch.equal(logits(copied), expected)  # of the copy, not of the original
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), expected)
    outsize.fuse_lora(model, parts=())
    assert [type(module) for module in model.modules()] == before and not any(
        "forward" in vars(module) for module in model.modules()
    )
    assert torch.equal(logits(model), logits(peft_model()))


# --- what is fused


def test_parts_are_those_of_axolotls_keys() -> None:
    model = adapted()
    parts: dict[tuple[Part, ...], set[str]] = {
        ("mlp",): {"gate_proj", "up_proj", "down_proj", "mlp"},
        ("qkv",): {"q_proj", "k_proj", "v_proj"},
        ("o",): {"o_proj"},
        (): set(),
    }
    for part, names in parts.items():
        assert names_of_fused(outsize.fuse_lora(model, part)) == names
    with pytest.raises(ConfigError, match=r"parts has 'qk'\. Choose among mlp, qkv, o\."):
        outsize.fuse_lora(model, ("qk",))  # type: ignore[arg-type]


def test_how_many_layers_are_fused_is_logged_with_the_reasons_for_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outsize")
    outsize.fuse_lora(peft_model())
    assert caplog.messages == ["fused LoRA: 14 of 14 layers, 2 gated MLPs as a whole"]
    caplog.clear()
    model = adapted(dtype=torch.bfloat16, use_dora=True, target_modules=["q_proj", "v_proj"])
    model.conv = nn.Conv1d(4, 4, 1)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv", "o_proj"]), model, adapter_name="default")
    for name, param in model.named_parameters():
        if "o_proj.lora" in name:
            param.data = param.data.float()
    outsize.fuse_lora(model)
    (message,) = caplog.messages
    assert message.startswith("fused LoRA: 0 of 4 layers, 0 gated MLPs as a whole; PEFT's forward runs in the others: ")
    assert "DoraLinearVariant (2)" in message and "float32 adapters over a bfloat16 base (1)" in message
    assert "Conv1d layer (1)" in message
    caplog.clear()
    outsize.fuse_lora(nn.Linear(2, 2))
    assert caplog.messages == ["fused LoRA: 0 of 0 layers, 0 gated MLPs as a whole"]
