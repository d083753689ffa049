"""OSFT through the engine: saving, resuming, loading and exporting."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cells import CHUNK_BYTES, closing
from osft_runs import (
    HALF,
    MIXED,
    PLANS,
    TIGHT,
    assert_equal,
    engine_names,
    named_state,
    prepare,
    step,
    uninterrupted,
    values,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import outsize
from outsize.base.errors import BadFile, ConfigError
from outsize.optim.split import join


@pytest.mark.parametrize(("before", "after"), [("roomy", "tight"), ("tight", "mixed"), ("mixed", "roomy")])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, before: str, after: str) -> None:
    losses, weights = uninterrupted(4)
    with closing(prepare(pins=PLANS[before])) as engine:
        found = [step(engine, seed) for seed in (0, 1)]
        engine.save(tmp_path / "checkpoint", background=True)
        engine.finish_saving()
    with closing(prepare(pins=PLANS[after])) as engine:
        engine.load(tmp_path / "checkpoint")
        found += [step(engine, seed) for seed in (2, 3)]
        assert_equal(values(engine), weights)
    assert found == losses


def test_the_bases_of_another_machine_are_taken_from_beside_the_checkpoint(tmp_path: Path) -> None:
    """An SVD gives other bits than the Gram matrix, as another machine does."""
    losses, weights = uninterrupted(4)
    with closing(prepare()) as engine:
        step(engine, 0), step(engine, 1)
        engine.save(tmp_path / "checkpoint")
    (bases,) = tmp_path.glob("bases-*.safetensors")
    other = outsize.OSFT(unfreeze_rank_ratio=0.5, svd=True)
    with closing(prepare(pins=TIGHT, method=other)) as engine:
        engine.load(tmp_path / "checkpoint")
        assert [step(engine, 2), step(engine, 3)] == losses[2:]
        assert_equal(values(engine), weights)
        engine.save(tmp_path / "again")
    assert list(tmp_path.glob("bases-*.safetensors")) == [bases], "stored once"
    content = bases.read_bytes()
    bases.unlink()
    with closing(prepare(method=other)) as engine:
        before = values(engine)
        for cut, message in ((None, "is missing"), (-64, "is damaged or truncated"), (0, "is damaged or truncated")):
            if cut is not None:
                bases.write_bytes(content[:cut])
            with pytest.raises(BadFile, match=rf"bases-.*{message}"):
                engine.load(tmp_path / "checkpoint")
            assert_equal(values(engine), before)
            step(engine, 0)  # nothing is half-loaded
            before = values(engine)
        bases.write_bytes(content[:-8] + bytes(8))
        with pytest.raises(BadFile, match=r"bases-.* is damaged: its content has another hash than its name"):
            engine.load(tmp_path / "checkpoint")
        bases.write_bytes(content)
        engine.load(tmp_path / "checkpoint")
        assert [step(engine, 2), step(engine, 3)] == losses[2:]


def test_a_checkpoint_of_other_initial_weights_changes_nothing(tmp_path: Path) -> None:
    with closing(prepare()) as engine:
        step(engine, 0)
        engine.save(tmp_path / "checkpoint")
    with closing(prepare(zoo.make("plain", torch.bfloat16, seed=1))) as engine:
        before = values(engine)
        with pytest.raises(BadFile, match="had another initial value there"):
            engine.load(tmp_path / "checkpoint")
        assert_equal(values(engine), before)
    with closing(prepare(method=None)) as engine, pytest.raises(BadFile, match="not a checkpoint of this model"):
        engine.load(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "method",
    [
        outsize.OSFT(unfreeze_rank_ratio=0.25),
        outsize.OSFT(unfreeze_rank_ratio=0.5, others="freeze"),
        outsize.OSFT(unfreeze_rank_ratio=0.5, rank_pattern={"0": 0.25}),
        outsize.OSFT(unfreeze_rank_ratio=0.5, target_modules=r".*0.*"),
    ],
    ids=["rank", "others", "pattern", "targets"],
)
def test_a_checkpoint_of_other_settings_changes_nothing(tmp_path: Path, method: outsize.OSFT) -> None:
    with closing(prepare()) as engine:
        step(engine, 0)
        engine.save(tmp_path / "checkpoint")
    with closing(prepare(method=method)) as engine:
        before = values(engine)
        with pytest.raises(BadFile, match="is not a checkpoint of this model"):
            engine.load(tmp_path / "checkpoint")
        assert_equal(values(engine), before)
        step(engine, 0)


def test_weights_alone_are_loaded_with_their_coordinates(tmp_path: Path) -> None:
    with closing(prepare()) as engine:
        step(engine, 0)
        engine.save(tmp_path / "checkpoint", only_model=True)
        expected = values(engine)
        step(engine, 1)
        engine.load(tmp_path / "checkpoint", only_model=True)
        assert_equal(values(engine), expected)
        found = step(engine, 1)
    with closing(prepare(pins=TIGHT)) as engine:
        engine.load(tmp_path / "checkpoint", only_model=True)
        assert dict(engine_names(engine.optimizer.state_dict())).keys() == set(engine.runtime.coordinates.names)
        assert step(engine, 1) == found
    with closing(prepare(method=outsize.OSFT(unfreeze_rank_ratio=0.25))) as engine:
        before = values(engine)
        with pytest.raises(BadFile, match=r"coordinates of .* is torch.float32 \(64, 16\) there"):
            engine.load(tmp_path / "checkpoint", only_model=True)
        assert_equal(values(engine), before)


def test_an_optimizer_state_that_is_cleared_keeps_the_weight() -> None:
    """As in torch, where the state is momentum alone."""
    with closing(prepare(pins=MIXED)) as engine:
        step(engine, 0)
        before = values(engine)
        for param in engine.model.parameters():
            engine.optimizer.state[param] = {}
        assert_equal(values(engine), before)
        assert not any(engine.runtime.updates.steps.values())
        found = {name: state["coordinates"] for name, state in named_state(engine) if "coordinates" in state}
        assert found and all(drift.any() for drift in found.values())


@pytest.mark.parametrize("pins", PLANS.values(), ids=PLANS)
def test_an_optimizer_state_makes_the_weights(pins: outsize.Pins | None) -> None:
    with closing(prepare()) as engine:
        step(engine, 0)
        state = {key: value for key, value in engine.optimizer.state_dict().items()}
        state["state"] = {i: {k: v.clone() for k, v in one.items()} for i, one in state["state"].items()}
        expected = values(engine)
    split = [name for name, place in engine_names(state) if "coordinates" in place]
    assert split
    with closing(prepare(pins=pins)) as engine:
        engine.optimizer.load_state_dict(state)
        found = values(engine)
        assert_equal({name: found[name] for name in split}, {name: expected[name] for name in split})


def test_an_optimizer_state_of_other_initial_weights_is_refused() -> None:
    with closing(prepare()) as engine:
        step(engine, 0)
        state = engine.optimizer.state_dict()
    with closing(prepare(engine.model)) as again, pytest.raises(ConfigError, match="had other initial values"):
        again.optimizer.load_state_dict(state)


def test_a_third_task_is_resumed_under_another_plan(tmp_path: Path) -> None:
    with closing(prepare(pins=MIXED)) as engine:
        for seed in (0, 1):
            step(engine, seed)
            engine.next_task()
        before = values(engine)
        step(engine, 2)
        engine.save(tmp_path / "checkpoint")
        expected = [step(engine, 3), step(engine, 4)]
        weights = values(engine)
    model = zoo.make("plain", torch.bfloat16)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(before[name])
    with closing(prepare(model, TIGHT)) as engine:
        engine.load(tmp_path / "checkpoint")
        assert [step(engine, 3), step(engine, 4)] == expected
        assert_equal(values(engine), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_before_the_first_step_nothing_differs_from_the_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = zoo.make("plain", dtype)
    with torch.no_grad():
        logits = plain.eval()(**zoo.batch("plain")).logits
    with closing(prepare(pins=TIGHT, dtype=dtype)) as engine:
        with torch.no_grad():
            assert torch.equal(engine.model.eval()(**zoo.batch("plain")).logits, logits)
        assert_equal(values(engine), {name: value.detach() for name, value in plain.named_parameters()})


@pytest.mark.parametrize("pins", PLANS.values(), ids=PLANS)
def test_an_export_is_the_model_before_and_after_steps(tmp_path: Path, pins: outsize.Pins | None) -> None:
    """D29, D36: the files of step 0 are the checkpoint's, and later ones have the logits of the live model."""
    model, batch = zoo.make("llama-untied", torch.bfloat16), zoo.batch("llama-untied")
    model.save_pretrained(tmp_path / "start")
    start = load_file(tmp_path / "start" / "model.safetensors")
    settings: dict[str, Any] = {"optimizer": outsize.AdamW(lr=1e-2), "method": HALF, "pins": pins}
    with closing(outsize.prepare(model, batch, device="sim:1GiB", chunk_bytes=CHUNK_BYTES, **settings)) as engine:
        engine.export(tmp_path / "0")
        assert_equal(load_file(tmp_path / "0" / "model.safetensors"), start)
        for _ in range(2):
            engine.model(**batch).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.export(tmp_path / "2")
        with torch.no_grad():
            logits = engine.model.eval()(**batch).logits
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "2", dtype="auto").eval()
    for name, buffer in exported.named_buffers():  # the zoo's model has its rotary frequencies in bf16
        buffer.copy_(model.get_buffer(name))
    with torch.no_grad():
        assert exported.dtype == torch.bfloat16 and torch.equal(exported(**batch).logits, logits)
    assert any(not torch.equal(value, start[name]) for name, value in exported.state_dict().items())


@pytest.mark.parametrize("pins", PLANS.values(), ids=PLANS)
def test_an_export_in_fp32_has_the_masters(tmp_path: Path, pins: outsize.Pins | None) -> None:
    """Of drifts, base + Q D P before it is rounded; of other weights, both halves."""
    model = zoo.make("llama-untied", torch.bfloat16)
    optimizer = outsize.osft.AdamW(zoo.make("llama-untied", torch.bfloat16), HALF, lr=1e-2)
    settings: dict[str, Any] = {"optimizer": outsize.AdamW(lr=1e-2), "method": HALF, "pins": pins}
    batch = zoo.batch("llama-untied")
    with closing(outsize.prepare(model, batch, device="sim:1GiB", chunk_bytes=CHUNK_BYTES, **settings)) as engine:
        engine.model(**batch).loss.backward()
        engine.optimizer.step()
        engine.export(tmp_path, fp32=True)
        lower = {name: found["lo"] for name, found in named_state(engine) if "lo" in found}
        rounded = values(engine)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert found.dtype == torch.float32
    split = optimizer.split_weights.keys()
    for name, value in found.named_parameters():
        assert torch.equal(value.to(torch.bfloat16), rounded[name]) or name in lower
        assert name in split or torch.equal(value, join(rounded[name], lower[name]))
    assert any(not torch.equal(found.get_parameter(name), rounded[name].float()) for name in split)
