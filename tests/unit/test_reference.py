"""The reference optimizer: held to torch.optim.AdamW in fp32, and exact about masters, clipping, non-finite steps and
accumulation.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError, NonFiniteGradient
from outsize.optim.clip import clip_factor
from outsize.optim.split import join
from outsize.reference import AdamW


def ulps(a: Tensor, b: Tensor, *operands: Tensor) -> float:
    """The largest distance of two fp32 tensors, in ulps of the largest operand: after a cancellation the result's own
    ulp is no measure.
    """
    size = torch.stack([a.abs(), b.abs(), *(o.abs() for o in operands)]).amax(0).double()
    ulp = torch.exp2(torch.floor(torch.log2(size.clamp_min(2.0**-126))) - 23)
    return float(((a.double() - b.double()).abs() / ulp).max())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_step_is_within_two_ulp_of_torch_from_equal_state(weight_decay: float) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    ours, theirs = nn.Parameter(torch.randn(20_000)), nn.Parameter(torch.zeros(20_000))
    mine, plain = AdamW([ours], **options), torch.optim.AdamW([theirs], foreach=False, fused=False, **options)
    for step in range(8):
        theirs.data.copy_(ours.data)
        if step:  # restart from our state, so that differences do not add up
            for key in ("exp_avg", "exp_avg_sq"):
                plain.state[theirs][key].copy_(mine.state[ours][key])
        grad, weight = torch.randn(20_000), ours.data.clone()
        m = mine.state[ours]["exp_avg"].clone() if step else torch.zeros(20_000)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        plain.step()
        # In the weight's own ulps wherever it is not as small as the update itself; there (|w| near lr) the update's
        # rounding shows: ulps of lr.
        large = weight.abs() > 10 * options["lr"]
        assert large.sum() > 19_000 and ulps(ours.data[large], theirs.data[large]) <= 2
        assert ulps(ours.data, theirs.data, torch.full((20_000,), options["lr"])) <= 2
        assert ulps(mine.state[ours]["exp_avg"], plain.state[theirs]["exp_avg"], m, grad) <= 2
        assert ulps(mine.state[ours]["exp_avg_sq"], plain.state[theirs]["exp_avg_sq"]) <= 2
        assert mine.state[ours]["step"] == int(plain.state[theirs]["step"]) == step + 1


def test_bf16_parameter_is_the_upper_half_of_an_fp32_run() -> None:
    """Same gradients, same start: joined masters equal the fp32 parameter to the bit, so the dtype of the weight does
    not enter the arithmetic.
    """
    torch.manual_seed(1)
    start = torch.randn(3, 50).bfloat16()
    low, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    a, b = AdamW([low], lr=1e-5), AdamW([full], lr=1e-5)
    for _ in range(20):
        low.grad = torch.randn(3, 50).bfloat16()
        full.grad = low.grad.float()
        a.step()
        b.step()
        assert torch.equal(join(low.detach(), a.state[low]["lo"]), full.detach())
    assert sorted(a.state[low]) == ["exp_avg", "exp_avg_sq", "lo", "step"] and sorted(b.state[full]) == [
        "exp_avg",
        "exp_avg_sq",
        "step",
    ]


def test_movement_does_not_stall_at_a_tiny_learning_rate() -> None:
    torch.manual_seed(2)
    start = (1 + torch.rand(1000)).bfloat16()
    p = nn.Parameter(start.clone())
    full = nn.Parameter(start.float())
    ours, plain = AdamW([p], lr=1e-5, weight_decay=0), torch.optim.AdamW([full], lr=1e-5, weight_decay=0)
    drift = torch.randn(1000)
    for _ in range(100):
        p.grad = (drift + 0.3 * torch.randn(1000)).bfloat16()
        full.grad = p.grad.float()
        ours.step()
        plain.step()
    moved = (join(p.detach(), ours.state[p]["lo"]) - start.float()).abs().sum()
    assert moved >= 0.95 * (full.detach() - start.float()).abs().sum() > 0


def test_groups_keep_their_own_hyperparameters() -> None:
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = AdamW([{"params": [a], "lr": 0.1, "weight_decay": 0.0}, {"params": [b]}], lr=0.01, weight_decay=0.5)
    alone_a, alone_b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    single = [AdamW([alone_a], lr=0.1, weight_decay=0.0), AdamW([alone_b], lr=0.01, weight_decay=0.5)]
    for p in (a, b, alone_a, alone_b):
        p.grad = torch.full((4,), 0.5)
    optimizer.step()
    for other in single:
        other.step()
    assert torch.equal(a, alone_a) and torch.equal(b, alone_b) and not torch.equal(a, b)


def test_named_parameters_are_taken_with_their_names() -> None:
    model = nn.Linear(3, 2)
    assert AdamW(model.named_parameters()).param_groups[0]["param_names"] == ["weight", "bias"]


def test_parameter_without_gradient_is_left_untouched() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([used, unused], weight_decay=0.5)
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3).bfloat16()) and not optimizer.state[unused]
    unused.grad = torch.ones(3).bfloat16()
    optimizer.step()
    assert optimizer.state[used]["step"] == 2 and optimizer.state[unused]["step"] == 1


def test_norm_is_of_all_gradients_and_clipping_is_in_fp32() -> None:
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(10, 10).bfloat16()), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(5))]
    optimizer = AdamW(params, max_grad_norm=0.5)
    params[0].grad, params[2].grad = torch.randn(10, 10).bfloat16(), torch.randn(5)
    exact = math.sqrt(float(params[0].grad.double().square().sum() + params[2].grad.double().square().sum()))
    want = [p.grad.float() * clip_factor(exact, 0.5) for p in params if p.grad is not None]
    optimizer.step()
    assert optimizer.grad_norm.dtype == torch.float64 and optimizer.grad_norm.dim() == 0
    assert optimizer.grad_norm.item() == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], want[0] * 0.1)
    torch.testing.assert_close(optimizer.state[params[2]]["exp_avg"], want[1] * 0.1)


def test_clipping_above_the_norm_changes_no_bit() -> None:
    torch.manual_seed(4)
    a = nn.Parameter(torch.randn(100).bfloat16())
    b = nn.Parameter(a.detach().clone())
    for p, limit in ((a, None), (b, 1e6)):
        p.grad = torch.linspace(-1, 1, 100).bfloat16()
        AdamW([p], max_grad_norm=limit).step()
    assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_raises_before_any_state_changes(bad: float) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([first, second])
    first.grad, second.grad = torch.ones(3), torch.tensor([0, bad, 0]).bfloat16()
    with pytest.raises(NonFiniteGradient, match="nothing was updated"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3)) and not optimizer.state[first] and not optimizer.state[second]


def test_non_finite_step_is_skipped_and_counted() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], nonfinite="skip", max_grad_norm=1.0)
    p.grad = torch.ones(3)
    optimizer.step()
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    p.grad = torch.tensor([1, math.nan, 1])
    optimizer.step()
    assert optimizer.skipped == 1 and torch.equal(p, before) and optimizer.state[p]["step"] == 1
    assert all(torch.equal(optimizer.state[p][key], state[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert math.isnan(optimizer.grad_norm.item())


def backward(p: nn.Parameter, scale: float) -> None:
    (p * torch.full_like(p, scale)).sum().backward()


def test_fp32_accumulation_sums_what_bf16_would_lose() -> None:
    """1 + 2**-9 is no bf16 value: summed in `.grad` the small gradients vanish, summed in fp32 they count."""
    p = nn.Parameter(torch.ones(4).bfloat16())
    twin = nn.Parameter(torch.ones(4).bfloat16())
    optimizer, plain = AdamW([p], fp32_grads=True), AdamW([twin])
    for scale in (1.0, 2**-9, 2**-9):
        backward(p, scale)
        backward(twin, scale)
        assert p.grad is None
    optimizer.step()
    plain.step()
    assert torch.equal(optimizer.state[p]["exp_avg"], torch.full((4,), 1 + 2**-8) * 0.1)
    assert torch.equal(plain.state[twin]["exp_avg"], torch.ones(4) * 0.1)


def test_single_backward_gives_the_same_bits_with_fp32_accumulation() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16()
    twin = copy.deepcopy(model)
    optimizers = [
        AdamW(model.parameters(), fp32_grads=True, max_grad_norm=0.1),
        AdamW(twin.parameters(), max_grad_norm=0.1),
    ]
    for _ in range(3):
        x = torch.randn(5, 8).bfloat16()
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_zero_grad_discards_fp32_sums_and_step_consumes_them() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = AdamW([p], fp32_grads=True)
    backward(p, 1.0)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state[p]
    backward(p, 1.0)
    optimizer.step()
    optimizer.step()  # a loop that calls model.zero_grad() must not add this gradient to the next one
    assert optimizer.state[p]["step"] == 1


def test_discarded_optimizer_takes_no_gradients() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    old = AdamW([p], fp32_grads=True)
    del old
    optimizer = AdamW([p], fp32_grads=True)
    backward(p, 1.0)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = AdamW([p])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0 and optimizer.state[p]["step"] == 1


def test_lr_schedulers_of_torch_work() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = AdamW([p], lr=1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    moves = []
    for _ in range(3):
        before = p.detach().clone()
        p.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        moves.append((before - p.detach()).mean().item())
    assert moves == pytest.approx([1.0, 0.5, 0.25], rel=1e-4)


def test_saved_state_resumes_to_the_bit_with_bf16_parameters() -> None:
    torch.manual_seed(6)
    p = nn.Parameter(torch.randn(50).bfloat16())
    optimizer, grads = AdamW([p]), [torch.randn(50).bfloat16() for _ in range(6)]
    for grad in grads[:3]:
        p.grad = grad
        optimizer.step()
    q = nn.Parameter(p.detach().clone())
    resumed = AdamW([q])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for grad in grads[3:]:
        p.grad = q.grad = grad
        optimizer.step()
        resumed.step()
    assert torch.equal(p, q)
    assert all(torch.equal(optimizer.state[p][key], resumed.state[q][key]) for key in ("exp_avg", "exp_avg_sq", "lo"))


@pytest.mark.parametrize("wrong", [dict(max_grad_norm=0.0), dict(max_grad_norm=-1.0), dict(nonfinite="ignore")])
def test_unusable_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AdamW([nn.Parameter(torch.ones(1))], **wrong)


def test_fp16_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        AdamW([nn.Parameter(torch.ones(1).half())])
