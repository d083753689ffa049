"""The optimizer for plain loops: `outsize.osft.AdamW`."""

import copy
import gc
import io
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import outsize
from outsize import reference
from outsize.base.errors import BadFile, ConfigError, EngineMisuse, ModelUnsupported, NonFiniteGradient
from outsize.methods.osft.bases import Bases, split
from outsize.methods.osft.products import contract, merge
from outsize.methods.osft.shape import SplitShape
from outsize.methods.osft.stored_bases import bases_hash

DRIFT = outsize.OSFT(unfreeze_rank_ratio=0.5)
MINI_TRAINER = outsize.OSFT(unfreeze_rank_ratio=0.5, parametrization="factors", variant="mini_trainer")
PEFT = outsize.OSFT(effective_rank=0.5, parametrization="factors", variant="peft")
SETTINGS = dict(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid = nn.Linear(24, 40), nn.Linear(40, 40, bias=False)
        self.norm, self.down = nn.LayerNorm(40), Conv1D(24, 40)
        nn.init.normal_(self.down.weight, std=0.2)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.mid(torch.tanh(self.up(x)))))

    def loss(self, seed: int, rows: slice = slice(None)) -> Tensor:
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)).to(self.up.weight.dtype)
        return ((self(x) - x.flip(1))[rows] ** 2).sum()


def train(model: Small, optimizer, steps: int, first: int = 0, micro_batches: int = 1) -> list[float]:
    norms = []
    for step in range(first, first + steps):
        for i in range(micro_batches):
            model.loss(step, slice(i * 16 // micro_batches, (i + 1) * 16 // micro_batches)).backward()
        optimizer.step()
        model.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return norms


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_equals_the_loop_written_out(dtype: torch.dtype, micro_batches: int) -> None:
    """With `contract`, `reference.AdamW` over drifts and other parameters, and `merge`: the same bits."""
    model, plain = Small(dtype), Small(dtype)
    optimizer = outsize.osft.AdamW(model, DRIFT, **SETTINGS)
    assert equal(model, plain), "D29: the start is the model"
    splits, trained = {}, {}
    for name, p in plain.named_parameters():
        if p.dim() == 2:
            is_transposed, base = name == "down.weight", p.detach().clone()
            bases = split(base, min(base.shape) // 2, is_transposed=is_transposed)
            splits[name] = (p, base, bases)
            trained[name] = nn.Parameter(torch.zeros(bases.shape.drift))
        else:
            trained[name] = p
    check = reference.AdamW(trained.items(), **SETTINGS)
    norms = train(model, optimizer, 5, micro_batches=micro_batches)
    for step in range(5):
        sums = {name: torch.zeros(bases.shape.drift) for name, (_, _, bases) in splits.items()}
        for i in range(micro_batches):
            plain.loss(step, slice(i * 16 // micro_batches, (i + 1) * 16 // micro_batches)).backward()
            for name, (p, _, bases) in splits.items():
                contract(p.grad, bases, out=sums[name], accumulate=True)
                p.grad = None
        for name, total in sums.items():
            trained[name].grad = total
        check.step()
        for name, (p, base, bases) in splits.items():
            merge(base, trained[name].detach(), bases, out=p.data)
        check.zero_grad()
        assert float(check.grad_norm) == norms[step]
    assert equal(model, plain) and norms[0] > 0.5


def test_all_free_is_full_fine_tuning_and_all_frozen_changes_nothing() -> None:
    """D31."""
    for dtype in (torch.bfloat16, torch.float32):
        model, plain = Small(dtype), Small(dtype)
        train(model, outsize.osft.AdamW(model, outsize.OSFT(unfreeze_rank_ratio=1), **SETTINGS), 3)
        train(plain, reference.AdamW(plain.named_parameters(), **SETTINGS), 3)
        assert equal(model, plain)
        model, start = Small(dtype), Small(dtype)
        with pytest.raises(ConfigError, match="nothing to train"):
            outsize.osft.AdamW(model, outsize.OSFT(unfreeze_rank_ratio=0, others="freeze"), **SETTINGS)
        model = Small(dtype)
        train(model, outsize.osft.AdamW(model, outsize.OSFT(unfreeze_rank_ratio=0), **SETTINGS), 2)
        for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True):
            assert torch.equal(p, q) == (p.dim() == 2), name


def saved(*states) -> list:
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("method", [DRIFT, MINI_TRAINER, PEFT], ids=["drift", "mini_trainer", "peft"])
def test_a_resumed_run_has_the_same_bits(method: outsize.OSFT) -> None:
    """D34: also the bases are the same. The optimizer is built on the start, as at the beginning of the run."""
    whole, model = Small(), Small()
    train(whole, outsize.osft.AdamW(whole, method, **SETTINGS), 6)
    optimizer = outsize.osft.AdamW(model, method, **SETTINGS)
    train(model, optimizer, 3)
    weights, state = saved(model.state_dict(), optimizer.state_dict())

    resumed = Small()
    optimizer = outsize.osft.AdamW(resumed, method, **SETTINGS)
    optimizer.load_state_dict(state)
    # The split weights come with the optimizer, the others with the model.
    assert all(torch.equal(p, weights[name]) for name, p in resumed.named_parameters() if p.dim() == 2)
    resumed.load_state_dict(weights)
    train(resumed, optimizer, 3, first=3)
    assert equal(resumed, whole)


def test_state_of_other_weights_or_settings_is_refused() -> None:
    model = Small()
    optimizer = outsize.osft.AdamW(model, DRIFT, **SETTINGS)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    with pytest.raises(BadFile, match=r"up\.weight: the saved drift is a change of other weights"):
        outsize.osft.AdamW(model, DRIFT, **SETTINGS).load_state_dict(state)
    other = outsize.OSFT(unfreeze_rank_ratio=0.25)
    with pytest.raises(BadFile, match=r"drift has \(12, 24\)|drift has \(40, 12\)"):
        outsize.osft.AdamW(Small(), other, **SETTINGS).load_state_dict(state)
    other = outsize.OSFT(unfreeze_rank_ratio=0.5, target_modules=["up"])
    with pytest.raises(BadFile, match=r"splits other weights than this optimizer: 2 differ, such as down\.weight"):
        outsize.osft.AdamW(Small(), other, **SETTINGS).load_state_dict(state)


def test_bases_of_another_machine_are_read_from_their_folder(tmp_path: Path) -> None:
    whole, model = Small(), Small()
    train(whole, outsize.osft.AdamW(whole, DRIFT, **SETTINGS), 4)
    optimizer = outsize.osft.AdamW(model, DRIFT, bases=tmp_path / "here", **SETTINGS)
    train(model, optimizer, 2)
    weights, state = saved(model.state_dict(), optimizer.state_dict())
    # The other machine has bases of equal spans, with other signs.
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "here").iterdir():
        negated = {name: -tensor for name, tensor in load_file(path).items()}
        name = f"{path.stem.split('-')[0]}-{bases_hash(Bases(SplitShape(1, 1, 0), **negated))}.safetensors"
        save_file(negated, tmp_path / "there" / name)
    resumed = Small()
    optimizer = outsize.osft.AdamW(resumed, DRIFT, bases=tmp_path / "there", **SETTINGS)
    with pytest.raises(BadFile, match=r"bases of another machine, and .*there does not hold"):
        optimizer.load_state_dict(state)
    for path in (tmp_path / "here").iterdir():
        shutil.copy(path, tmp_path / "there")
    optimizer.load_state_dict(state)
    resumed.load_state_dict(weights)
    train(resumed, optimizer, 2, first=2)
    assert equal(resumed, whole)


@pytest.mark.parametrize("method", [DRIFT, MINI_TRAINER], ids=["drift", "factors"])
def test_the_next_task_begins_with_the_current_weights(method: outsize.OSFT) -> None:
    model, settings = Small(torch.float32), {**SETTINGS, "max_grad_norm": None}
    optimizer = outsize.osft.AdamW(model, method, **settings)
    train(model, optimizer, 3)
    before = copy.deepcopy(model)
    optimizer.next_task()
    assert equal(model, before)
    fresh = outsize.osft.AdamW(before, method, **settings)
    train(model, optimizer, 2, first=3)
    train(before, fresh, 2, first=3)
    assert equal(model, before)


def test_the_lower_halves_of_other_weights_survive_the_next_task() -> None:
    model = Small()
    optimizer = outsize.osft.AdamW(model, DRIFT, **SETTINGS)
    train(model, optimizer, 3)
    before = optimizer.state[model.norm.weight]["lo"].clone()
    optimizer.next_task()
    state = optimizer.state[model.norm.weight]
    assert torch.equal(state["lo"], before) and before.any() and state["step"] == 0 and not state["exp_avg"].any()
    train(model, optimizer, 1)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model, start = Small(), Small()
    optimizer = outsize.osft.AdamW(model, DRIFT, **SETTINGS)
    (model.loss(0) * torch.inf).backward()
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    assert equal(model, start)
    optimizer = outsize.osft.AdamW(model, DRIFT, nonfinite="skip", **SETTINGS)
    (model.loss(0) * torch.inf).backward()
    optimizer.step()
    assert equal(model, start) and optimizer.skipped == 1
    model.zero_grad()
    train(model, optimizer, 1)
    train(start, outsize.osft.AdamW(start, DRIFT, **SETTINGS), 1)
    assert equal(model, start), "the skipped step leaves no gradient"


def test_groups_name_weights_and_a_discarded_optimizer_takes_no_gradient() -> None:
    model = Small()
    groups = [{"params": ["up.weight", model.norm.weight], "weight_decay": 0.0}]
    optimizer = outsize.osft.AdamW(model, MINI_TRAINER, groups=groups, **SETTINGS)
    assert optimizer.param_groups[0]["param_names"] == ["up.weight.u", "up.weight.s", "up.weight.v", "norm.weight"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    del optimizer
    gc.collect()
    model.loss(0).backward()
    assert model.up.weight.grad is not None


def test_update_in_backward_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the engine"):
        outsize.osft.AdamW(Small(), DRIFT, update="in_backward")


def test_masters_are_the_weights_before_rounding() -> None:
    for method in (DRIFT, MINI_TRAINER):
        model = Small()
        optimizer = outsize.osft.AdamW(model, method, **SETTINGS)
        train(model, optimizer, 2)
        masters = dict(optimizer.masters())
        assert masters.keys() == {"up.weight", "mid.weight", "down.weight"}
        for name, master in masters.items():
            weight = model.get_parameter(name)
            assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), weight)


def with_a_gap(model: Small) -> Small:
    """Every weight has half of its singular values from 2 to 3 and half below 0.5, so that half of its directions are
    the same in any precision.
    """
    for weight in (p for p in model.parameters() if p.dim() == 2):
        u, s, v = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        values = torch.cat([torch.linspace(3, 2, len(s) // 2), torch.linspace(0.5, 0.01, len(s) - len(s) // 2)])
        weight.data = ((u * values) @ v).to(weight.dtype)
    return model


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        pytest.param(DRIFT, torch.bfloat16, id="drift-bf16"),
        pytest.param(DRIFT, torch.float32, id="drift-fp32", marks=pytest.mark.full),
        pytest.param(MINI_TRAINER, torch.float32, id="mini_trainer-fp32"),
    ],
)
def test_200_steps_of_a_model_leave_its_large_singular_directions(method: outsize.OSFT, dtype: torch.dtype) -> None:
    """D28, of the singular vectors in fp64 of the weights that training began with."""
    model = with_a_gap(Small(dtype))
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    optimizer = outsize.osft.AdamW(model, method, **{**SETTINGS, "lr": 1e-3})
    norms = train(model, optimizer, 200, micro_batches=2)
    assert min(norms) > SETTINGS["max_grad_norm"], "every step clips"
    for name, master in optimizer.masters():
        u, _, v = torch.linalg.svd(start[name], full_matrices=False)
        k, change = len(v) // 2, master.double() - start[name]
        assert change.norm() > 1e-2 * start[name].norm()
        assert (u[:, :k].T @ change).norm() < 1e-5 * change.norm(), name
        assert (change @ v[:k].T).norm() < 1e-5 * change.norm(), name


@pytest.mark.parametrize("method", [DRIFT, MINI_TRAINER], ids=["drift", "factors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_others_write_are_refused(method: outsize.OSFT, dtype: torch.dtype) -> None:
    """The next step would undo it without a word."""
    model = Small(dtype)
    optimizer = outsize.osft.AdamW(model, method, **SETTINGS)
    model.load_state_dict(Small(dtype).state_dict())
    train(model, optimizer, 1)
    with torch.no_grad():  # as another machine may round them
        model.mid.weight.copy_(model.mid.weight * (1 + torch.finfo(dtype).eps))
    train(model, optimizer, 1)
    with torch.no_grad():
        model.mid.weight[3, 4] += 0.1
    with pytest.raises(EngineMisuse, match=r"mid\.weight: it was written, .*or call its next_task\(\)"):
        train(model, optimizer, 1)
    optimizer.zero_grad()
    expected = model.mid.weight.detach().clone()
    optimizer.next_task()
    assert torch.equal(model.mid.weight, expected)
    train(model, optimizer, 1)
    model.to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
    with pytest.raises(EngineMisuse, match=r"down\.weight is torch\..* but was .*Move and convert the model before"):
        train(model, optimizer, 1)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    for method in (DRIFT, MINI_TRAINER):
        model = Small()
        model.mid.weight.data[1, 2] = torch.nan
        with pytest.raises(ModelUnsupported, match=r"mid\.weight.*NaN"):
            outsize.osft.AdamW(model, method, **SETTINGS)


@pytest.mark.parametrize("method", [DRIFT, MINI_TRAINER], ids=["drift", "factors"])
def test_a_third_task_is_resumed_with_the_same_bits(method: outsize.OSFT) -> None:
    model = Small()
    optimizer = outsize.osft.AdamW(model, method, **SETTINGS)
    for task in range(3):
        begin = copy.deepcopy(model)
        lower = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 2, first=4 * task)
        weights, state = saved(model.state_dict(), optimizer.state_dict())
        train(model, optimizer, 2, first=4 * task + 2)
        if task < 2:
            optimizer.next_task()
    assert lower["state"], "halves of other weights go on from task to task"
    again = outsize.osft.AdamW(begin, method, **SETTINGS)
    again.load_state_dict(state)
    begin.load_state_dict(weights)
    train(begin, again, 2, first=10)
    assert equal(begin, model)
