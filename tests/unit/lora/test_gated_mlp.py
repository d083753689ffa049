"""Gated MLPs are found by what they compute."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, T5Config, T5ForConditionalGeneration
from transformers.activations import ACT2FN

import outsize
from outsize.lora.gated_mlp import GatedMLP, recognize

NAMES = ("first", "second", "third")


class Gated(nn.Module):
    """With names that say nothing."""

    def __init__(self, activation: str = "silu", hidden: int = 8, inner: int = 12):
        super().__init__()
        self.third = nn.Linear(inner, hidden)
        self.first = nn.Linear(hidden, inner, bias=False)
        self.second = nn.Linear(hidden, inner)
        self.act = ACT2FN[activation]

    def inner(self, x: Tensor) -> Tensor:
        return self.act(self.first(x)) * self.second(x)

    def forward(self, x: Tensor) -> Any:
        return self.third(self.inner(x))


FORMULAS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (8, 8)])
@pytest.mark.parametrize("activation", FORMULAS)
def test_the_formula_and_its_parts_are_found(activation: str, sizes: tuple[int, int]) -> None:
    module = Gated(activation, *sizes)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert recognize(module, NAMES) == GatedMLP("first", "second", "third", FORMULAS[activation], False)
    assert recognize(module, NAMES[::-1]) == recognize(module, NAMES)
    assert torch.equal(torch.get_rng_state(), state) and module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class UpFirst(Gated):
    def inner(self, x: Tensor) -> Tensor:
        return self.second(x) * self.act(self.first(x))


def test_the_order_of_the_projections_is_found() -> None:
    found = recognize(UpFirst(), NAMES)
    assert found is not None and found.up_first


class Clamped(Gated):
    def inner(self, x: Tensor) -> Tensor:
        return self.act(self.first(x)).clamp(max=7) * self.second(x)


class Normed(Gated):
    def inner(self, x: Tensor) -> Tensor:
        return F.rms_norm(super().inner(x), (x.shape[-1],))


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Dropped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.dropout(self.inner(x), 0.1, self.training))


class EvalOnly(Gated):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * (1 if self.training else 2)


class Pair(Gated):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class TwoInputs(Gated):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x + y)


class Twice(Gated):
    def inner(self, x: Tensor) -> Tensor:
        self.first(x)
        return super().inner(x)


class Shuffled(Gated):
    def inner(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return super().inner(x)


class Counting(Gated):
    calls = 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().inner(x)


class Recording(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def inner(self, x: Tensor) -> Any:
        self.largest.copy_(x.abs().max())  # type: ignore[operator]
        return super().inner(x)


OTHERS = [Clamped, Normed, Scaled, Residual, Dropped, EvalOnly, Pair, TwoInputs, Twice, Shuffled, Counting, Recording]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_modules_are_not_taken_for_one(kind: type[Gated]) -> None:
    assert recognize(kind(), NAMES) is None


@pytest.mark.parametrize("activation", ["relu", "quick_gelu", "gelu_10", "tanh"])
def test_other_activations_are_not_taken_for_one(activation: str) -> None:
    assert recognize(Gated(activation), NAMES) is None


def test_other_shapes_and_replaced_forwards() -> None:
    odd = Gated()
    odd.third = nn.Linear(12, 9)
    assert recognize(odd, NAMES) is None and recognize(Gated(), NAMES[:2]) is None
    patched = Gated()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert recognize(patched, NAMES) is None


FAMILIES = [
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "gpt2",
]
WHOLE = {"phi3": 0, "gpt2": 0}
"""Phi 3 has one projection for gate and up; GPT 2 has no gate."""


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers(family: str) -> None:
    sizes: dict[str, Any] = dict(
        model_type=family, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    if family == "gpt2":
        sizes = dict(model_type=family, vocab_size=64, n_embd=32, n_layer=1, n_head=4)
    config = AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.double().eval()
    ids = torch.arange(12).view(2, 6)
    expected = model(input_ids=ids).logits
    outsize.fuse_lora(model)
    whole = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
    assert sum(type(module).__name__.startswith("Fused") for module in whole) == WHOLE.get(family, 1)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-10, atol=1e-10)


def test_t5_drops_hidden_values_unless_its_dropout_is_zero() -> None:
    """With dropout its MLP is left alone; its projections are fused."""
    sizes: dict[str, Any] = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    for rate in (0.1, 0.0):
        config = T5Config(**sizes, feed_forward_proj="gated-gelu", dropout_rate=rate)
        model = get_peft_model(
            T5ForConditionalGeneration(config), LoraConfig(r=2, target_modules=["wi_0", "wi_1", "wo"])
        )
        names = [type(module).__name__ for module in outsize.fuse_lora(model).modules()]
        assert names.count("FusedLinear") == 6 and names.count("FusedT5DenseGatedActDense") == (0 if rate else 2)


def test_a_model_on_meta_is_recognized() -> None:
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        )
        model = AutoModelForCausalLM.from_config(config)
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"), low_cpu_mem_usage=True)
        outsize.fuse_lora(model)
    assert sum(type(module).__name__ == "FusedLlamaMLP" for module in model.modules()) == 2
