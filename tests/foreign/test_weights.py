"""Reads and writes of prepared weights between steps: averages, norms, histograms, walks over parameters, clamping,
re-initialising.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import foreign_plans
import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outsize
from outsize.base.errors import EngineMisuse, StaleParameter

EVERY_PLAN = foreign_plans.EVERY_PLAN
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def train(
    model: nn.Module, optimizer: Any, between: Callable[[nn.Module, int], Any], steps: int = 3
) -> tuple[list[float], list[Any]]:
    losses, seen = [], []
    for seed in range(steps):
        loss = model(**zoo.batch("llama", seed=seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seen.append(between(model, seed))
    return losses, seen


def assert_same_run(plan: str, between: Callable[[nn.Module, int], Any], *, dtype: torch.dtype = torch.float32) -> None:
    """The same losses, the same results of `between`, the same weights in the end."""
    (plain, reference), (model, engine) = foreign_plans.both(plan, dtype=dtype)
    expected, expected_seen = train(plain, reference, between)
    losses, seen = train(model, engine.optimizer, between)
    assert losses == expected
    for found, wanted in zip(seen, expected_seen, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    engine.detach()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


# --- reads


def walk(model: nn.Module, seed: int) -> dict[str, Any]:
    with torch.no_grad():
        return {
            "sum": {n: p.sum() for n, p in model.named_parameters()},
            "data norm": {n: p.data.norm() for n, p in model.named_parameters()},
            "detached": {n: p.detach().clone() for n, p in model.named_parameters()},
            "foreach": torch._foreach_norm(list(model.parameters())),
            "vector": nn.utils.parameters_to_vector(model.parameters()),
            "histogram": {n: torch.histc(p.float(), 10) for n, p in model.named_parameters()},
            "numpy": {n: np.asarray(p.detach().float()).copy() for n, p in model.named_parameters()},
            "layer": [p.view(-1)[:3].clone() for p in model.model.layers[2].parameters()],
            "state": {n: v.clone() for n, v in model.state_dict().items()},
            "count": sum(p.numel() for p in model.parameters()),
        }


@EVERY_PLAN
@DTYPES
def test_walks_over_all_parameters_between_steps(plan: str, dtype: torch.dtype) -> None:
    """`p.data` and `p.detach()` passed the guard and read whatever the slot held."""
    assert_same_run(plan, walk, dtype=dtype)


@EVERY_PLAN
@pytest.mark.parametrize("ema", [False, True], ids=["swa", "ema"])
def test_averaged_model(plan: str, ema: bool) -> None:
    """torch's SWA and EMA; the average was wrong in 30 of 31 tensors."""
    averages: dict[int, AveragedModel] = {}

    def update(model: nn.Module, seed: int) -> list[Tensor]:
        if id(model) not in averages:
            averages[id(model)] = AveragedModel(
                zoo.make("llama"), multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None
            )
        averages[id(model)].update_parameters(model)
        return [p.detach().clone() for p in averages[id(model)].parameters()]

    assert_same_run(plan, update)


@EVERY_PLAN
def test_an_ema_by_hand_with_copies_of_the_prepared_parameters(plan: str) -> None:
    """As many training scripts have it: shadows made of the model's own parameters, deep copies included."""
    shadows: dict[int, list[Tensor]] = {}

    def update(model: nn.Module, seed: int) -> list[Tensor]:
        if id(model) not in shadows:
            shadows[id(model)] = [copy.deepcopy(p).requires_grad_(False) for p in model.parameters()]
        for shadow, param in zip(shadows[id(model)], model.parameters(), strict=True):
            shadow.data = 0.9 * shadow.data + 0.1 * param.data
        return [shadow.clone() for shadow in shadows[id(model)]]

    assert_same_run(plan, update)


class EMAModel:
    """What diffusers' class of this name does: shadows, copied into the model for an evaluation, and the model's own
    weights put back.
    """

    def __init__(self, params: list[nn.Parameter]):
        self.shadows = [p.clone().detach() for p in params]

    @torch.no_grad()
    def step(self, params: list[nn.Parameter]) -> None:
        for shadow, param in zip(self.shadows, params, strict=True):
            shadow.sub_(0.1 * (shadow - param))

    def evaluate(self, model: nn.Module) -> float:
        params = list(model.parameters())
        stored = [param.detach().cpu().clone() for param in params]
        for shadow, param in zip(self.shadows, params, strict=True):
            param.data.copy_(shadow.to(param.device).data)
        with torch.no_grad():
            loss = float(model(**zoo.batch("llama", seed=99)).loss)
        for value, param in zip(stored, params, strict=True):
            param.data.copy_(value.data)
        return loss


@EVERY_PLAN
def test_an_ema_that_is_copied_into_the_model_for_an_evaluation(plan: str) -> None:
    averages: dict[int, EMAModel] = {}

    def update(model: nn.Module, seed: int) -> float:
        ema = averages.setdefault(id(model), EMAModel(list(model.parameters())))
        ema.step(list(model.parameters()))
        return ema.evaluate(model)

    assert_same_run(plan, update)


@EVERY_PLAN
def test_reading_without_no_grad_gives_values_and_differentiating_them_is_refused(plan: str) -> None:
    (plain, _), (model, engine) = foreign_plans.both(plan)
    norm = sum(p.norm() for p in model.parameters())
    assert float(norm) == float(sum(p.norm() for p in plain.parameters()))
    loss = model(**zoo.batch("llama")).loss + 0.01 * norm
    with pytest.raises(EngineMisuse, match=r"outside of the model's forward was differentiated.*weight_decay"):
        loss.backward()
    engine.optimizer.zero_grad()
    model(**zoo.batch("llama")).loss.backward()
    engine.optimizer.step()
    engine.detach()


@EVERY_PLAN
def test_weights_read_between_forward_and_backward(plan: str) -> None:
    (plain, reference), (model, engine) = foreign_plans.both(plan)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        loss = run(**zoo.batch("llama")).loss
        with torch.no_grad():
            run.seen = [float(p.norm()) for p in run.parameters()]
        loss.backward()
        optimizer.step()
    assert model.seen == plain.seen
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_pickles_and_copies_of_parameters_have_their_values() -> None:
    model = zoo.make("llama", dtype=torch.bfloat16)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed")
    buffer = io.BytesIO()
    torch.save(
        {"params": dict(model.named_parameters()), "data": {n: p.data for n, p in model.named_parameters()}}, buffer
    )
    buffer.seek(0)
    for name, saved in torch.load(buffer, weights_only=True).items():
        for key, value in saved.items():
            assert type(value) is (nn.Parameter if name == "params" else Tensor) and torch.equal(
                value, expected[key]
            ), (name, key)
    copied = copy.deepcopy(model.model.layers[3].mlp.up_proj.weight)
    assert type(copied) is nn.Parameter and torch.equal(copied, expected["model.layers.3.mlp.up_proj.weight"])
    engine.detach()


def test_a_tensor_held_over_a_detach_is_refused_and_one_held_over_steps_is_the_live_weight() -> None:
    (plain, reference), (model, engine) = foreign_plans.both("streamed")
    held = {n: p.data for n, p in model.named_parameters()}
    train(plain, reference, lambda *_: None, steps=2)
    train(model, engine.optimizer, lambda *_: None, steps=2)
    assert all(torch.equal(held[n], p) for n, p in plain.named_parameters())
    engine.detach()
    with pytest.raises(StaleParameter, match=r"lm_head|embed.*detached"):
        held["model.embed_tokens.weight"].sum()


def test_a_module_called_by_itself_uses_its_weights() -> None:
    (plain, reference), (model, engine) = foreign_plans.both("streamed")
    train(plain, reference, lambda *_: None, steps=1)
    train(model, engine.optimizer, lambda *_: None, steps=1)
    ids, x = zoo.batch("llama")["input_ids"], torch.randn(2, 3, zoo.HIDDEN)
    with torch.no_grad():
        assert torch.equal(model.get_input_embeddings()(ids), plain.get_input_embeddings()(ids))
        assert torch.equal(model.model.layers[2].mlp(x), plain.model.layers[2].mlp(x))
        model.model.layers[2].mlp.up_proj.weight.mul_(2)
        plain.model.layers[2].mlp.up_proj.weight.mul_(2)
        assert torch.equal(model.model.layers[2].mlp(x), plain.model.layers[2].mlp(x))
    engine.detach()


# --- writes


def clamp(model: nn.Module, seed: int) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.02, 0.02)


def clamp_no_grad(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        torch._foreach_clamp_max_(list(model.parameters()), 0.02)
        for param in model.parameters():
            param.clamp_(min=-0.02)


def reinitialise(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    nn.init.normal_(model.model.layers[1].mlp.down_proj.weight, std=0.02)
    model.model.layers[2].mlp.up_proj.weight.data.normal_(std=0.02)
    with torch.no_grad():
        model.lm_head.weight[3] = 0.5
        model.model.layers[0].self_attn.q_proj.weight.view(-1)[:5].zero_()


def assign_data(model: nn.Module, seed: int) -> None:
    for param in model.parameters():
        param.data = param.data * 0.99


def load(model: nn.Module, seed: int) -> None:
    other = zoo.make("llama", seed=seed + 5)
    if seed == 1:
        model.load_state_dict(other.state_dict())
    else:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other.parameters()), model.parameters())


def spectral_like(model: nn.Module, seed: int) -> list[Tensor]:
    """Divides a weight by its norm in place, through views."""
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight /= weight.norm()
        weight.data.t()[:, :2] += 0.25
        weight.detach().add_(0.125)
    return [weight.detach().clone()]


@EVERY_PLAN
@pytest.mark.parametrize(
    "write", [clamp, clamp_no_grad, reinitialise, assign_data, load, spectral_like], ids=lambda f: f.__name__
)
def test_writes_between_steps(plan: str, write: Callable[[nn.Module, int], Any]) -> None:
    """On CUDA such writes went into a slot and were lost."""
    assert_same_run(plan, write)


@EVERY_PLAN
def test_a_teacher_that_is_prepared_follows_its_student(plan: str) -> None:
    """BYOL and TRL's sync_ref_model: the target's parameters are written from the source's, both prepared."""

    def sync(target: nn.Module, source: nn.Module) -> None:
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.data.mul_(0.4).add_(theirs.data, alpha=0.6)

    (plain, reference), (model, engine) = foreign_plans.both(plan)
    plain_teacher, teacher = zoo.make("llama", seed=9), zoo.make("llama", seed=9)
    teacher_engine = foreign_plans.prepared(teacher, zoo.batch("llama"), plan)
    train(plain, reference, lambda m, _: sync(plain_teacher, m))
    train(model, engine.optimizer, lambda m, _: sync(teacher, m))
    with torch.no_grad():
        assert float(teacher(**zoo.batch("llama")).loss) == float(plain_teacher(**zoo.batch("llama")).loss)
    engine.detach()
    teacher_engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), plain_teacher.parameters(), strict=True))


@EVERY_PLAN
def test_a_bf16_weight_that_is_written_is_its_own_master_and_the_others_keep_theirs(plan: str) -> None:
    model = zoo.make("llama", dtype=torch.bfloat16)
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)
    train(model, engine.optimizer, lambda *_: None, steps=2)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = dict(model.named_parameters())[name]
    before, lo = weight.data.clone(), engine.optimizer.state[weight]["lo"].clone()
    assert bool(lo.any())
    with torch.no_grad():
        weight.data[2:4].zero_()
        weight.clamp_(max=float(before.max()) / 2)
    changed = weight.data != before
    assert bool(changed.any()) and not bool(changed.all())
    now = engine.optimizer.state[weight]["lo"]
    assert not bool(now[changed].any()) and torch.equal(now[~changed], lo[~changed])
    train(model, engine.optimizer, lambda *_: None, steps=1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    engine.detach()


def test_what_would_lose_a_write_is_refused() -> None:
    model = zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed")
    up, down = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        up.add_(1)
    with pytest.raises(EngineMisuse, match="keeps its shape, dtype and device"):
        up.data = torch.ones(3)
    with pytest.raises(EngineMisuse, match="memory of another prepared parameter"):
        up.data = down.data
    loss = model(**zoo.batch("llama")).loss
    with pytest.raises(EngineMisuse, match="between a forward and its backward"), torch.no_grad():
        up.mul_(2)
    loss.backward()
    engine.optimizer.step()
    engine.detach()


@pytest.mark.parametrize("device", ["sim:64MiB"])
def test_on_sim_reads_and_writes_cause_no_race_and_stay_in_budget(device: str) -> None:
    model, plain = zoo.make("llama"), zoo.make("llama")
    engine = outsize.prepare(
        model, zoo.batch("llama"), optimizer=foreign_plans.SPEC, device=device, gpu_memory="2MiB", chunk_bytes="16KiB"
    )
    between = lambda m, seed: (walk(m, seed), clamp(m, seed))
    assert train(model, engine.optimizer, between)[0] == train(plain, foreign_plans.reference(plain), between)[0]
    engine.detach()
