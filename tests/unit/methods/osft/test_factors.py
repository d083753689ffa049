"""`parametrization="factors"`: its algebra in fp64, and the published steps."""

from typing import Any

import pytest
import torch
from published_osft import Factored, published_step
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.methods.osft.factors import contract_factors, merge_factors, project_u, project_v, split_factors

SIZES = [(16, 40), (24, 24), (40, 16)]


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize(("n", "m", "k"), [(n, m, k) for n, m in SIZES for k in (0, 1, 5, min(n, m) - 1)])
def test_gradients_equal_autograd_of_four_factors(n: int, m: int, k: int) -> None:
    """D30."""
    weight, x, y, bias = random(n, m), random(9, m, seed=1), random(9, n, seed=2), random(n, seed=3)
    split = split_factors(weight, k)
    frozen = (split.frozen_u * torch.linalg.svdvals(weight)[:k]) @ split.frozen_v
    assert relative(frozen + merge_factors(split.u, split.s, split.v), weight) < 1e-12
    # Anywhere, not only at the start.
    u, s, v = (t + 0.1 * random(*t.shape, seed=4) for t in (split.u, split.s, split.v))
    leaves = [t.clone().requires_grad_() for t in (u, s, v)]
    hidden = x @ frozen.T + x @ leaves[2].T * leaves[1] @ leaves[0].T
    expected = torch.autograd.grad(((hidden + bias - y) ** 2).sum(), leaves)
    dense = (frozen + merge_factors(u, s, v)).requires_grad_()
    (gradient,) = torch.autograd.grad(((x @ dense.T + bias - y) ** 2).sum(), dense)
    for found, wanted in zip(contract_factors(gradient, u, s, v), expected, strict=True):
        assert relative(found, wanted) < 1e-12


@pytest.mark.parametrize(("n", "m", "k"), [(16, 40, 5), (40, 16, 15), (24, 24, 0)])
def test_projections_remove_the_frozen_directions_alone(n: int, m: int, k: int) -> None:
    split = split_factors(random(n, m), k)
    u, v = random(*split.u.shape, seed=1), random(*split.v.shape, seed=2)
    eye_n, eye_m = torch.eye(n).double(), torch.eye(m).double()
    expected = (eye_n - split.frozen_u @ split.frozen_u.T) @ u, v @ (eye_m - split.frozen_v.T @ split.frozen_v)
    project_u([u], [split.frozen_u])
    project_v(v, split.frozen_v, k)
    assert relative(u, expected[0]) < 1e-12 and relative(v, expected[1]) < 1e-12


class Three(nn.Module):
    """Independent linear layers, so that each weight has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.tall = nn.Linear(40, 16, bias=False), nn.Linear(16, 40, bias=False)
        self.square = nn.Linear(16, 16, bias=False)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.wide.weight, self.tall.weight, self.square.weight]

    @staticmethod
    def loss(weight: Tensor, seed: int) -> Tensor:
        n, m = weight.shape
        x, y = random(12, m, seed=seed).to(weight.dtype), random(12, n, seed=seed + 1000).to(weight.dtype)
        return ((x @ weight.T - y) ** 2).mean()


@pytest.mark.parametrize("variant", ["peft", "mini_trainer"])
def test_steps_equal_the_published_steps(variant: str) -> None:
    rank = {"effective_rank": 0.5} if variant == "peft" else {"unfreeze_rank_ratio": 0.5}
    method = outsize.OSFT(parametrization="factors", variant=variant, **rank)
    settings = dict(lr=1e-2, weight_decay=0.1, eps=1e-4)
    model = Three()
    optimizer = outsize.osft.AdamW(model, method, max_grad_norm=0.1, **settings)
    published = [Factored(p.detach(), 8, lr=1e-2, decay=0.1, eps=1e-4) for p in model.weights]
    start = [p.detach().clone() for p in model.weights]
    for step in range(20):
        sum(model.loss(p, step) for p in model.weights).backward()
        optimizer.step()
        published_step(published, lambda dense, step=step: sum(model.loss(w, step) for w in dense), variant, 0.1)
    for p, first, expected in zip(model.weights, start, published, strict=True):
        assert relative(p - first, expected.weight(expected.low) - first.double()) < 1e-4
        assert relative(p, first) > 0.05


@pytest.mark.parametrize("variant", [pytest.param("peft", marks=pytest.mark.full), "mini_trainer"])
def test_what_200_steps_leak(variant: str) -> None:
    """D10, D28. Projecting gradients alone leaks: Adam's scaling rotates the update. mini_trainer's parameters are
    projected, too. Clipping and weight decay are on."""
    rank = {"effective_rank": 8} if variant == "peft" else {"unfreeze_rank_ratio": 0.5}
    method = outsize.OSFT(parametrization="factors", variant=variant, **rank)
    model = Three()
    optimizer = outsize.osft.AdamW(model, method, lr=1e-3, weight_decay=0.1, max_grad_norm=0.1)
    start = [p.detach().double() for p in model.weights]
    for step in range(200):
        sum(model.loss(p, step) for p in model.weights).backward()
        optimizer.step()
    for first, weight in zip(start, optimizer.split_weights.values(), strict=True):
        split = split_factors(first, 8)
        change = weight.master().double() - first
        leaks = [
            float((split.frozen_u.T @ change).norm() / change.norm()),
            float((change @ split.frozen_v.T).norm() / change.norm()),
        ]
        assert max(leaks) < 1e-5 if variant == "mini_trainer" else max(leaks) > 1e-2


def llama() -> Any:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=50, **shape))


def test_steps_equal_those_of_peft_itself() -> None:
    peft = pytest.importorskip("peft")
    if not hasattr(peft, "OSFConfig"):
        pytest.skip("this PEFT has no OSF")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = dict(lr=1e-2, weight_decay=0.1, eps=1e-3)
    rank = dict(effective_rank=0.5, rank_pattern={"up_proj": 5})
    start = dict(llama().named_parameters())
    theirs = peft.get_peft_model(llama(), peft.OSFConfig(target_modules=targets, **rank))
    trained = [p for p in theirs.parameters() if p.requires_grad]
    theirs_optimizer = torch.optim.AdamW(trained, **settings)
    ours = llama()
    method = outsize.OSFT(parametrization="factors", variant="peft", target_modules=targets, **rank)
    optimizer = outsize.osft.AdamW(ours, method, max_grad_norm=0.05, **settings)
    for seed in range(5):
        ids = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(seed))
        losses = [model(input_ids=ids, labels=ids).loss for model in (theirs, ours)]
        sum(losses).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.05)
        theirs_optimizer.step()
        optimizer.step()
        assert float(norm) == pytest.approx(float(optimizer.grad_norm), rel=1e-4) and float(norm) > 0.05
        theirs_optimizer.zero_grad()
    merged, mine = dict(theirs.merge_and_unload().named_parameters()), dict(ours.named_parameters())
    assert len(optimizer.split_weights) == 14
    for name, weight in merged.items():
        if name in optimizer.split_weights:
            assert relative(mine[name] - start[name], weight - start[name]) < 1e-4, name
        else:
            assert torch.equal(mine[name], weight), name
