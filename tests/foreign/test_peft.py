"""Every method of the installed PEFT: trained to the same bits as by a plain loop, or refused with a text listed here.

The loop is over `peft.PeftType`: a method that a later PEFT adds fails here until it has a case.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells
import foreign_plans
import numpy as np
import peft
import pytest
import torch
import zoo
from cells import Outcome, Traced
from peft import PeftType
from safetensors.torch import load_file
from torch import Tensor, nn

import outsize
from outsize.base.errors import ModelUnsupported, PlanInfeasible
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.profile import cache
from outsize.runtime.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
STEPS = 2
"""The first has no moments, the second has."""
CHUNK_BYTES = 4 * 1024
SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)
LINEAR = ["q_proj", "v_proj"]
SQUARE = ["q_proj", "o_proj"]


@dataclasses.dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    """Of the method's own config class."""
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the model beside the zoo's batch."""


CASES: dict[PeftType, Case] = {
    PeftType.PROMPT_TUNING: Case({"num_virtual_tokens": 3}),
    PeftType.MULTITASK_PROMPT_TUNING: Case(
        {"num_virtual_tokens": 3, "num_tasks": 2}, batch={"task_ids": torch.tensor([0, 1])}
    ),
    PeftType.P_TUNING: Case({"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    PeftType.PREFIX_TUNING: Case({"num_virtual_tokens": 3}),
    PeftType.LORA: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.ADALORA: Case({"init_r": 3, "target_r": 2, "total_step": 10, "target_modules": LINEAR}),
    PeftType.ADAMSS: Case({"r": 4, "num_subspaces": 2, "target_modules": LINEAR}),
    PeftType.BOFT: Case({"boft_block_size": 4, "target_modules": SQUARE}),
    PeftType.ADAPTION_PROMPT: Case({"adapter_len": 3, "adapter_layers": 2}),
    PeftType.IA3: Case({"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    PeftType.BEFT: Case({"target_modules": LINEAR}),
    PeftType.LILY: Case({"r": 2, "stride_A": 2, "num_B": 2, "target_modules": LINEAR}),
    PeftType.LOHA: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.LOKR: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.OFT: Case({"oft_block_size": 8, "target_modules": LINEAR}),
    PeftType.POLY: Case(
        {"r": 2, "n_tasks": 2, "n_skills": 2, "target_modules": LINEAR}, batch={"task_ids": torch.tensor([0, 1])}
    ),
    PeftType.LN_TUNING: Case({}),
    PeftType.VERA: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.FROD: Case({"target_modules": LINEAR, "progressbar": False}),
    PeftType.PVERA: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.FOURIERFT: Case({"n_frequency": 20, "target_modules": LINEAR}),
    PeftType.GLORA: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.XLORA: Case({"hidden_size": zoo.HIDDEN, "xlora_depth": 1}),
    PeftType.HRA: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.VBLORA: Case({"r": 2, "num_vectors": 8, "vector_length": 4, "target_modules": LINEAR}),
    PeftType.UNILORA: Case({"r": 2, "theta_d_length": 32, "target_modules": LINEAR}),
    PeftType.CPT: Case({"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}),
    PeftType.MISS: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.RANDLORA: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.ROAD: Case({"group_size": 8, "target_modules": LINEAR}),
    PeftType.TRAINABLE_TOKENS: Case({"token_indices": [3, 4, 5]}),
    PeftType.HIRA: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.SHIRA: Case({"r": 2, "random_seed": 0, "target_modules": LINEAR}),
    PeftType.C3A: Case({"block_size": 8, "target_modules": LINEAR}),
    PeftType.WAVEFT: Case({"n_frequency": 20, "target_modules": LINEAR}),
    PeftType.OSF: Case({"effective_rank": 4, "target_modules": LINEAR}),
    PeftType.DELORA: Case({"r": 2, "target_modules": LINEAR}),
    PeftType.GRALORA: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.CARTRIDGE: Case({"num_virtual_tokens": 3}),
    PeftType.TINYLORA: Case({"r": 2, "u": 4, "weight_tying": 1.0, "target_modules": LINEAR}),
    PeftType.PSOFT: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.PEANUT: Case({"r": 4, "target_modules": LINEAR}),
    PeftType.SHADOW: Case(
        {"r": 2, "shadow_hidden_size": 8, "shadow_intermediate_size": 16, "shadow_num_attention_heads": 2}
    ),
    PeftType.SUPERTUNING: Case({"target_modules": LINEAR}),
    PeftType.DEFT: Case({"r": 2, "target_modules": LINEAR}),
}


MADE_AGAIN_OTHERWISE = {
    PeftType.PREFIX_TUNING: "saved tensor 12 is",  # the second run appends to the cache that the first has filled
    PeftType.CARTRIDGE: "saved tensor 12 is",
    PeftType.XLORA: "saved tensor 6 is",  # scalings come in through hooks that are gone when the forward returns
    PeftType.POLY: "raises ValueError: task_ids should not be None",  # so do task ids
}
"""Methods whose layers are not recomputed, and what the note says of them."""
REFUSED = {PeftType.CPT: "prompt_encoder.default.delta_embedding.weight: the model's forward replaces the data of this"}
SHARING = (
    PeftType.VERA,
    PeftType.PVERA,
    PeftType.VBLORA,
    PeftType.RANDLORA,
    PeftType.TINYLORA,
    PeftType.UNILORA,
    PeftType.LILY,
)
"""Layers have modules or parameters in common."""
SHARES = (PeftType.VERA, PeftType.VBLORA, PeftType.LILY)
"""Of these by default: frozen matrices, a bank of vectors, factors."""
SPARSE = (PeftType.SHIRA, PeftType.FROD)
"""Forwards make sparse tensors of dense parameters."""
ON_SIM = (PeftType.XLORA, PeftType.POLY, PeftType.LILY, PeftType.SHIRA)
"""Of ONCE_BROKEN, those that the default run trains on `sim`."""
ONCE_BROKEN = (*MADE_AGAIN_OTHERWISE, *SHARING, *SPARSE, PeftType.SHADOW)
LIKE_LORA = (
    PeftType.BEFT,
    PeftType.LOHA,
    PeftType.LOKR,
    PeftType.FOURIERFT,
    PeftType.GLORA,
    PeftType.MISS,
    PeftType.ROAD,
    PeftType.HIRA,
    PeftType.C3A,
    PeftType.WAVEFT,
    PeftType.DELORA,
    PeftType.GRALORA,
    PeftType.PSOFT,
    PeftType.PEANUT,
    PeftType.SUPERTUNING,
    PeftType.DEFT,
)
"""A few dense parameters beside each linear layer, of which its forward makes another product. LoRA, AdaLoRA, AdaMSS,
BOFT, HRA, IA3, OFT and OSF stand for them by default."""
TRAINED = [method for method in PeftType if method not in REFUSED]
PLANS: dict[str, dict[str, Any]] = {
    "streamed": {"weights": "host", "optimizer": "host", "depth": 0, "strategy": "recompute"},
    "resident": {"weights": "gpu", "optimizer": "gpu", "strategy": "keep"},
}


def name_of(value: Any) -> str | None:
    return value.name.lower() if isinstance(value, PeftType) else None


@functools.cache
def saved_loras() -> dict[str, str]:
    """What X-LoRA mixes. PEFT looks for them by their number."""
    folder = Path(tempfile.mkdtemp())
    for name in ("0", "1"):
        torch.manual_seed(int(name))
        config = peft.LoraConfig(r=2, target_modules=LINEAR, task_type="CAUSAL_LM", init_lora_weights=False)
        peft.get_peft_model(zoo.make("llama"), config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("0", "1")}


class Slices:
    """Stands for scikit-learn's KMeans, which AdaMSS calls once when it is built: neighbours are a cluster."""

    def __init__(self, n_clusters: int, **_: Any):
        self.n_clusters = n_clusters

    def fit_predict(self, rows: np.ndarray) -> np.ndarray:
        return np.arange(len(rows)) * self.n_clusters // len(rows)


@contextlib.contextmanager
def scikit_learn() -> Iterator[None]:
    if importlib.util.find_spec("sklearn") is not None:
        yield
        return
    package, cluster = types.ModuleType("sklearn"), types.ModuleType("sklearn.cluster")
    cluster.KMeans = Slices  # type: ignore[attr-defined]
    sys.modules |= {"sklearn": package, "sklearn.cluster": cluster}
    try:
        yield
    finally:
        del sys.modules["sklearn"], sys.modules["sklearn.cluster"]


def build(method: PeftType, **more: Any) -> nn.Module:
    """`more`: fields of the config."""
    config = CASES[method].config | ({"adapters": saved_loras()} if method is PeftType.XLORA else {}) | more
    torch.manual_seed(0)
    with scikit_learn():
        made = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[method](task_type="CAUSAL_LM", **config)
        model = peft.get_peft_model(zoo.make("llama"), made)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad and not param.any():  # a zero factor gives the other one no gradient
                param.normal_(std=0.1)
    return model.train()


def batches(method: PeftType) -> list[dict[str, Tensor]]:
    return [batch | CASES[method].batch for batch in cells.batches("llama", 3)]


@functools.cache
def plain(method: PeftType) -> Outcome:
    before = build(method)
    outcome = cells.plain(build(method), batches(method), spec=SPEC, steps=STEPS)
    trained = {name: param.detach() for name, param in before.named_parameters() if param.requires_grad}
    assert any(not torch.equal(outcome.weights[name], value) for name, value in trained.items()), "nothing was trained"
    return outcome


@functools.cache
def traced(method: PeftType) -> Traced:
    """On `sim`, which does not time: bytes are the same on the CPU."""
    model = build(method)
    return cache.traced(model, batches(method)[0], find_layers(model), machine())


def train(method: PeftType, engine: Engine) -> Outcome:
    return cells.train(engine.model, engine.optimizer, batches(method), steps=STEPS, accumulate=1, engine=engine)


def machine(num_bytes: int = cells.GiB) -> SimDevice:
    return SimDevice(lookup(f"{num_bytes}B"))


# --- every method


def test_every_method_of_peft_has_a_case() -> None:
    assert set(CASES) == set(PeftType), "give the methods that are new in this PEFT a case"


@pytest.mark.parametrize("plan", ["streamed", pytest.param("resident", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "method",
    [  # test_prepare_trains_it trains the others
        pytest.param(method, marks=pytest.mark.full) if method in (*ONCE_BROKEN, *LIKE_LORA) else method
        for method in TRAINED
    ],
    ids=name_of,
)
def test_training_equals_plain_peft(method: PeftType, plan: str) -> None:
    how = {"spec": SPEC, "chunk_bytes": CHUNK_BYTES, "traced": traced(method), **PLANS[plan]}
    engine = cells.prepare_by_hand(build(method), batches(method)[0], **how)
    with cells.closing(engine):
        recomputes = plan == "streamed" and method not in MADE_AGAIN_OTHERWISE
        assert set(engine.plan.decision.strategies) == ({"keep", "recompute"} if recomputes else {"keep"})
        cells.assert_same(train(method, engine), plain(method))
    assert all(
        torch.equal(param.detach(), plain(method).weights[name]) for name, param in engine.model.named_parameters()
    ), "after detach"


@pytest.mark.parametrize("method", REFUSED, ids=name_of)
def test_a_method_that_cannot_be_trained_is_refused_by_prepare_and_left_as_it_was(method: PeftType) -> None:
    model = build(method)
    before = {name: (param.data_ptr(), param.detach().clone()) for name, param in model.named_parameters()}
    with pytest.raises(ModelUnsupported) as refused:
        outsize.prepare(model, batches(method)[0], optimizer=SPEC, device="cpu")
    assert str(refused.value).startswith(REFUSED[method]) and str(refused.value).endswith(
        "or train this model without outsize."
    )
    after = {name: (param.data_ptr(), param.detach()) for name, param in model.named_parameters()}
    assert all(
        after[name][0] == address and torch.equal(after[name][1], value) for name, (address, value) in before.items()
    )


# --- methods that prepare once refused, or failed on


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.full) if method in SHARING and method not in SHARES else method
        for method in ONCE_BROKEN
    ],
    ids=name_of,
)
def test_prepare_trains_it(method: PeftType, caplog: pytest.LogCaptureFixture) -> None:
    """As a user would. One note says of which block the activations cannot be recomputed, and why."""
    with caplog.at_level(logging.WARNING, "outsize"):
        engine = outsize.prepare(
            build(method), batches(method)[0], optimizer=SPEC, device=machine(), chunk_bytes=CHUNK_BYTES
        )
    with cells.closing(engine):
        cells.assert_same(train(method, engine), plain(method))
    notes = [record.getMessage() for record in caplog.records if "not recomputed" in record.getMessage()]
    assert len(notes) == (method in MADE_AGAIN_OTHERWISE)
    assert all("layers.0 and 3 more: " in note and MADE_AGAIN_OTHERWISE[method] in note for note in notes)


@pytest.mark.parametrize(
    "method", [m if m in ON_SIM else pytest.param(m, marks=pytest.mark.full) for m in ONCE_BROKEN], ids=name_of
)
def test_what_layers_share_is_sent_away_without_a_race_and_within_the_plans_bytes(method: PeftType) -> None:
    """`sim` refuses one byte more than the plan says, and accesses that are in no order."""
    how = {"spec": SPEC, "chunk_bytes": CHUNK_BYTES, "traced": traced(method), "budget": None, "device": machine()}
    home = {"weights": "host", "optimizer": "host", "strategy": "swap"}
    engine = cells.prepare_by_hand(build(method), batches(method)[0], **how, **home)
    with cells.closing(engine):
        assert "swap" in engine.plan.decision.strategies
        cells.assert_same(train(method, engine), plain(method))


@pytest.mark.parametrize("method", [PeftType.VBLORA, PeftType.PREFIX_TUNING], ids=name_of)
def test_the_smallest_budget_has_a_plan(method: PeftType) -> None:
    """With a search: layers that cannot be recomputed swap."""
    how = {"optimizer": SPEC, "chunk_bytes": CHUNK_BYTES}
    with pytest.raises(PlanInfeasible) as refused:
        outsize.prepare(build(method), batches(method)[0], device=machine(1), **how)
    engine = outsize.prepare(build(method), batches(method)[0], device=machine(refused.value.needed_bytes), **how)
    with cells.closing(engine):
        strategies = set(engine.plan.decision.strategies)
        assert (
            "swap" in strategies and not strategies & {"recompute", "offload"}
            if method in MADE_AGAIN_OTHERWISE
            else len(strategies) > 1
        )
        cells.assert_same(train(method, engine), plain(method))


@pytest.mark.parametrize(
    "method", [method for method in TRAINED if "num_virtual_tokens" in CASES[method].config], ids=name_of
)
def test_prompts_that_stream_are_saved_as_plain_peft_saves_them(method: PeftType, tmp_path: Path) -> None:
    """PEFT runs the prompt encoder for that, or reads its tensors, whatever their slots hold."""
    reference = build(method)
    how = {"spec": SPEC, "chunk_bytes": CHUNK_BYTES, "traced": traced(method), **PLANS["streamed"]}
    with cells.closing(cells.prepare_by_hand(build(method), batches(method)[0], **how)) as engine:
        train(method, engine)
        reference.load_state_dict(engine.model.state_dict())
        engine.model.save_pretrained(tmp_path / "ours")
        engine.export(tmp_path / "exported")
        engine.model(**batches(method)[0]).loss.backward()  # the parameters are in their slots again
    reference.save_pretrained(tmp_path / "plain")
    ours, exported, expected = (
        load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "exported", "plain")
    )
    assert list(ours) == list(exported) == list(expected)
    assert all(torch.equal(ours[key], value) and torch.equal(exported[key], value) for key, value in expected.items())
    assert "save_pretrained" not in vars(engine.model)


def test_a_generator_of_the_adapters_own_is_where_it_was_and_draws_once(caplog: pytest.LogCaptureFixture) -> None:
    """PVeRA may have one per module: a second run of a forward draws other numbers, of the same shapes."""

    def made() -> nn.Module:
        return build(PeftType.PVERA, generator_seed=3)

    data = batches(PeftType.PVERA)
    engine = cells.prepare_by_hand(made(), data[0], spec=SPEC, chunk_bytes=CHUNK_BYTES, **PLANS["streamed"])
    with cells.closing(engine):
        found = train(PeftType.PVERA, engine)
    cells.assert_same(found, cells.plain(made(), data, spec=SPEC, steps=STEPS))
    assert "the second run returns other values" in caplog.text


def test_a_sparse_parameter_is_refused_by_name() -> None:
    text = "head.scale: a sparse_coo tensor cannot be placed by a plan. Keep its values in a dense parameter"
    model = zoo.make("plain")
    model.head.scale = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(text)}"):
        outsize.prepare(model, zoo.batch("plain"), device="cpu")


@pytest.mark.parametrize("plan", PLANS)
def test_adalora_allocates_ranks_from_the_gradients(plan: str) -> None:
    """`update_and_allocate` reads p.grad after step() and writes the masked singular values."""
    method = PeftType.ADALORA
    data = batches(method)
    settings: dict[str, Any] = dict(tinit=1, tfinal=1, deltaT=1, total_step=6)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(5):
            loss = model(**data[number % len(data)]).loss
            loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(number)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected_model, model = build(method, **settings), build(method, **settings)
    expected = run(expected_model, foreign_plans.reference(expected_model, SPEC))
    with cells.closing(
        cells.prepare_by_hand(model, data[0], spec=SPEC, chunk_bytes=CHUNK_BYTES, **PLANS[plan])
    ) as engine:
        assert run(model, engine.optimizer) == expected
    wanted = dict(expected_model.named_parameters())
    assert all(torch.equal(param, wanted[name]) for name, param in model.named_parameters())
    masked = [p for name, p in model.named_parameters() if "lora_E" in name]
    assert any(bool((p == 0).any()) for p in masked), "ranks were taken away"
