"""Which modules run over tiles: found by trying them, without a list of families."""

from typing import Any

import pytest
import torch
from parity.test_tiles import batch, make, tiled_modules
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outsize.activation.tokenwise import why_not_tokenwise
from outsize.compat import fake_tensor
from outsize.model.state import ModuleState

NORMS = {"input_layernorm", "post_attention_layernorm"}
QK = {"self_attn.q_norm", "self_attn.k_norm"}
EXPECTED = {
    "llama": {"mlp", *NORMS},
    "qwen3": {"mlp", *NORMS, *QK},
    "gemma3": {"mlp", *NORMS, *QK, "pre_feedforward_layernorm", "post_feedforward_layernorm"},
    "gpt2": {"mlp"},  # its LayerNorms save their input alone
    "mixtral": {"mlp", *NORMS},
    "t5": {"layer.0.layer_norm", "layer.1"},  # of its encoder: the second is norm, MLP and residual
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_outermost_modules_that_save_more_than_their_input_are_found(kind: str, dtype: torch.dtype) -> None:
    found = tiled_modules(make(kind, dtype), batch(kind))
    prefix = {"gpt2": "transformer.h.1.", "t5": "encoder.block.1."}.get(kind, "model.layers.1.")
    assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == EXPECTED[kind]
    outside = [name for name in found if not any(part.isdigit() for part in name.split("."))]
    assert outside == {"gpt2": [], "t5": ["encoder.final_layer_norm"]}.get(kind, ["model.norm"])


def test_experts_whose_router_is_recorded_for_a_loss_are_not_tiled() -> None:
    model: Any = make("mixtral", torch.float32)
    model.config.output_router_logits = True
    assert {name.removeprefix("model.layers.1.") for name in tiled_modules(model, batch("mixtral"))} >= NORMS
    assert not any("mlp" in name for name in tiled_modules(model, batch("mixtral")))


class Try(nn.Module):
    """Saves much; what it computes beside that is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Any:
        return self.down(nn.functional.gelu(self.up(x)))


class Running(Try):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))


class PerLength(Try):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / x.shape[1]


class ExpertChoice(Try):
    """The tokens with the largest score are computed: which they are depends on all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.sum(-1).topk(3, dim=1).indices
        chosen = torch.zeros(x.shape[:2]).scatter(1, rows, 1.0)
        return super().forward(x) * chosen[..., None].to(x)


class _Auxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones(())


class AuxiliaryLoss(Try):
    """Adds the gradient of a loss over all tokens, in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return _Auxiliary.apply(y, 100 * self.up(x).mean().square()) if self.training else y


class Remembering(Try):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.mean()
        return super().forward(x)


class Writing(Try):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


class Pair(Try):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Generating(Try):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


OTHER = nn.Parameter(torch.ones(16))


class Borrowing(Try):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OTHER


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Try(), ""),
        (nn.Sequential(Try(), nn.Dropout(0.5)), ""),
        (LlamaRMSNorm(16), ""),
        (nn.Linear(16, 16), "no more than its input"),
        (nn.LayerNorm(16), "no more than its input"),
        (nn.Dropout(0.5), "no more than its input"),
        (nn.Identity(), "a view of its input"),
        (Attention(), "depends on others"),
        (Running(), "depends on others"),
        (nn.Sequential(Try(), nn.BatchNorm1d(20)), "fails with"),
        (ExpertChoice(), "depends on"),
        (PerLength(), "the number of tokens"),
        (AuxiliaryLoss(), "depends on"),
        (Remembering(), "writes last"),
        (Writing(), "fails with RuntimeError"),
        (Pair(), "its output is a tuple"),
        (Generating(), "a generator of its own"),
        (Borrowing(), "other trained tensors"),
        (nn.Sequential(Try(), nn.Flatten()), "its output is"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_is_refused_with_the_reason(module: nn.Module, reason: str) -> None:
    x = torch.randn(1, 20, 16)
    state, rng = ModuleState(module), torch.get_rng_state()
    params = dict(module.named_parameters())
    found = why_not_tokenwise(module, module.forward, x)
    assert reason in found and bool(reason) == bool(found), found
    assert state.changed() is None and torch.equal(rng, torch.get_rng_state())
    assert all(params[name] is param for name, param in module.named_parameters())


def test_fake_tensors_give_the_same_answers() -> None:
    with fake_tensor.FakeTensorMode():
        x, good, bad = torch.empty(1, 100_000, 16), Try(), Running()
        assert why_not_tokenwise(good, good.forward, x) == ""
        assert "depends on others" in why_not_tokenwise(bad, bad.forward, x)


def test_a_norm_in_bf16_of_frozen_weights_is_worth_it_for_its_fp32_copy() -> None:
    norm = LlamaRMSNorm(16).requires_grad_(False)
    assert "no more" in why_not_tokenwise(norm, norm.forward, torch.randn(1, 20, 16))
    norm = norm.to(torch.bfloat16)
    assert why_not_tokenwise(norm, norm.forward, torch.randn(1, 20, 16, dtype=torch.bfloat16)) == ""


def test_layers_of_the_same_structure_share_a_decision() -> None:
    model = make("llama", torch.float32)
    found = tiled_modules(model, batch("llama"))
    assert len([name for name in found if name.endswith("mlp")]) == model.config.num_hidden_layers  # type: ignore[union-attr]
    assert not any("forward" in vars(module) for module in model.modules())
