"""OSFT beyond single steps: saving, resuming, loading, tasks, and what user code does between steps."""

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from cells import CHUNK_BYTES, closing
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import outsize
from outsize.base.errors import BadFile, ConfigError, EngineMisuse, PlanInfeasible
from outsize.optim.split import join
from outsize.runtime.engine import Engine
from outsize.schedule.plan import Plan

HALF = outsize.OSFT(unfreeze_rank_ratio=0.5)
TIGHT = outsize.Pins(n_persist=0, n_buffer=1, n_optimizer_gpu=0, n_optimizer_streamed=0)
MIXED = outsize.Pins(n_persist=4, n_optimizer_gpu=4, n_optimizer_streamed=3)
PLANS = {"roomy": None, "tight": TIGHT, "mixed": MIXED}


def prepare(
    model: nn.Module | None = None,
    pins: outsize.Pins | None = None,
    method: Any = HALF,
    dtype: torch.dtype = torch.bfloat16,
) -> Engine:
    model = zoo.make("plain", dtype) if model is None else model
    optimizer = outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)
    batch = zoo.batch("plain")
    return outsize.prepare(
        model, batch, optimizer=optimizer, method=method, device="sim:1GiB", pins=pins, chunk_bytes=CHUNK_BYTES
    )


def step(engine: Engine, seed: int) -> float:
    loss = engine.model(**zoo.batch("plain", seed=seed)).loss
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return float(loss.detach())


def values(engine: Engine) -> dict[str, Tensor]:
    with engine.gathered() as found:
        return {name: value.clone() for name, value in found.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def uninterrupted(steps: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[float], dict[str, Tensor]]:
    with closing(prepare(dtype=dtype)) as engine:
        return [step(engine, seed) for seed in range(steps)], values(engine)


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


def engine_names(state: dict[str, Any]) -> list[tuple[str, dict[str, Tensor]]]:
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return [(names[i], one) for i, one in state["state"].items()]


@pytest.mark.parametrize("pins", PLANS.values(), ids=PLANS)
def test_the_next_task_equals_preparing_the_trained_model_again(pins: outsize.Pins | None) -> None:
    with closing(prepare(dtype=torch.float32)) as engine:
        step(engine, 0)
    with closing(prepare(engine.model)) as engine:
        expected = [step(engine, 1), step(engine, 2)]
        weights = values(engine)
    with closing(prepare(pins=pins, dtype=torch.float32)) as engine:
        step(engine, 0)
        engine.next_task()
        assert [step(engine, 1), step(engine, 2)] == expected
        assert_equal(values(engine), weights)


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


class Failing:
    """A method whose computation of constants fails once, at the weight number `at`."""

    def __init__(self, at: int, error: BaseException):
        self._at, self._error = at, error

    def bind(self, model: nn.Module) -> Any:
        method, compute = HALF.bind(model), HALF.bind(model).compute

        def failing(*args: Any) -> None:
            self._at -= 1
            if self._at == 0:
                raise self._error
            compute(*args)

        method.compute = failing
        return method


def test_weights_are_whole_after_an_interrupted_next_task() -> None:
    with closing(prepare(dtype=torch.float32, method=Failing(9 + 4, KeyboardInterrupt()))) as engine:
        assert len(engine.runtime.coordinates.names) == 9
        step(engine, 0)
        before = values(engine)
        with pytest.raises(KeyboardInterrupt):
            engine.next_task()
        engine.merge_loaded()
        after = values(engine)
        assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-6) for name in before)
        engine.next_task()
        step(engine, 1)


def test_weights_are_decomposed_on_the_host_if_the_device_has_too_little_memory() -> None:
    losses, weights = uninterrupted(2)
    with closing(prepare(method=Failing(3, torch.OutOfMemoryError("CUDA out of memory")))) as engine:
        assert [step(engine, 0), step(engine, 1)] == losses
        assert_equal(values(engine), weights)


def test_a_weight_that_was_written_through_a_state_dict_is_refused_every_time() -> None:
    with closing(prepare()) as engine:
        step(engine, 0)
        engine.model.state_dict()[engine.runtime.coordinates.names[0]].zero_()
        for _ in range(2):
            with pytest.raises(EngineMisuse, match="it was written, but a method trains it in coordinates"):
                step(engine, 1)


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


def test_all_directions_free_is_full_fine_tuning_and_none_is_frozen() -> None:
    with closing(prepare(method=None)) as engine:
        losses, weights = [step(engine, 0), step(engine, 1)], values(engine)
    with closing(prepare(method=outsize.OSFT(unfreeze_rank_ratio=1.0))) as engine:
        assert [step(engine, 0), step(engine, 1)] == losses
        assert_equal(values(engine), weights)
    before = zoo.make("plain", torch.bfloat16)
    with closing(prepare(method=outsize.OSFT(unfreeze_rank_ratio=0.0), pins=TIGHT)) as engine:
        step(engine, 0)
        after = values(engine)
    trained = {name for name, value in before.named_parameters() if not torch.equal(value, after[name])}
    linear = {f"{name}.weight" for name, module in before.named_modules() if isinstance(module, nn.Linear)}
    assert trained and not trained & (linear - {"head.weight", "lm_head.weight"})


def test_a_larger_batch_is_planned_again_with_the_same_bits() -> None:
    losses, weights = uninterrupted(3)
    with closing(prepare(pins=None)) as engine:
        found = [step(engine, 0)]
        with torch.no_grad():
            engine.model(**zoo.batch("plain", size=2))
        loss = engine.model(**zoo.batch("plain", size=5, tokens=24)).loss
        loss.backward()
        engine.optimizer.zero_grad()
        found += [step(engine, 1), step(engine, 2)]
        assert_equal(values(engine), weights)
    assert found == losses


@pytest.mark.parametrize("pins", [None, TIGHT], ids=["roomy", "tight"])
def test_accumulation_equals_one_large_batch_within_rounding(pins: outsize.Pins | None) -> None:
    """D33. With a large eps, the first update is proportional to the gradient."""

    def updates(sizes: list[slice]) -> dict[str, Tensor]:
        batch = zoo.batch("plain", size=4)
        settings: dict[str, Any] = {"optimizer": outsize.AdamW(lr=1.0, eps=1e3, weight_decay=0.0), "method": HALF}
        settings |= {"accumulate": len(sizes), "pins": pins, "chunk_bytes": CHUNK_BYTES, "device": "sim:1GiB"}
        with closing(outsize.prepare(zoo.make("plain", torch.float32), batch, **settings)) as engine:
            for part in sizes:
                loss = engine.model(**{key: value[part] for key, value in batch.items()}).loss
                (loss / len(sizes)).backward()
            engine.optimizer.step()
            found = dict(named_state(engine))
            norm = torch.tensor(float(engine.grad_norm))
            return {"norm": norm} | {n: found[n]["coordinates"].clone() for n in engine.runtime.coordinates.names}

    whole, parts = updates([slice(0, 4)]), updates([slice(i, i + 1) for i in range(4)])
    assert len(whole) == 10
    for name, value in whole.items():
        assert value.any() and float((parts[name] - value).norm() / value.norm()) < 2e-6, name


def test_gradients_and_weights_of_split_parameters_are_not_handed_out_for_writing() -> None:
    with closing(prepare(pins=MIXED)) as engine:
        names = engine.runtime.coordinates.names
        param = dict(engine.model.named_parameters())[names[0]]
        engine.model(**zoo.batch("plain")).loss.backward()
        with pytest.raises(EngineMisuse, match="the gradient that is kept is theirs"):
            _ = param.grad
        norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 0.01)
        assert float(norm) > 0.01
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        with pytest.raises(EngineMisuse, match="a method trains it in coordinates"), torch.no_grad():
            param.mul_(0.5)
        with pytest.raises(EngineMisuse, match="a method trains it in coordinates"), engine.gathered(names[0]) as found:
            found[names[0]].zero_()
        average = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
        assert_equal({n: v.cpu() for n, v in average.items()}, values(engine))


def plan_of_all() -> Plan:
    with closing(prepare(method=None)) as engine:
        return engine.plan


def test_what_the_method_froze_is_restored_if_prepare_fails() -> None:
    model = zoo.make("plain", torch.bfloat16)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    frozen = outsize.OSFT(unfreeze_rank_ratio=0.5, others="freeze")
    with pytest.raises(PlanInfeasible):
        outsize.prepare(model, zoo.batch("plain"), method=frozen, device="sim:1KiB")
    assert {name for name, param in model.named_parameters() if param.requires_grad} == trained
    with closing(prepare(model, method=frozen)) as engine:
        assert set(engine.runtime.updates.steps) == set(engine.runtime.coordinates.names)
    assert {name for name, param in model.named_parameters() if param.requires_grad} == trained
    nothing = outsize.OSFT(unfreeze_rank_ratio=0, others="freeze")
    for method, settings in ((nothing, {}), (frozen, {"gpu_memory": "much"}), (frozen, {"plan": plan_of_all()})):
        with pytest.raises(ConfigError):
            outsize.prepare(model, zoo.batch("plain"), method=method, device="sim:1GiB", **settings)
        assert {name for name, param in model.named_parameters() if param.requires_grad} == trained
    prepare(model, method=frozen)
    with closing(prepare(model)) as engine:  # a cell that is run again with other settings
        assert set(engine.runtime.updates.steps) == trained


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


def named_state(engine: Engine) -> list[tuple[str, dict[str, Tensor]]]:
    return [(name, engine.optimizer_state(name)) for name in engine.optimizer.names]


def test_factors_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"outsize\.osft\.AdamW"):
        prepare(method=outsize.OSFT(effective_rank=4, parametrization="factors", variant="peft"))


def test_a_plan_file_of_other_ranks_is_refused() -> None:
    with closing(prepare()) as engine:
        plan = engine.plan
    with pytest.raises(ConfigError, match="its method, or its ranks, are others than here"):
        outsize.prepare(
            zoo.make("plain", torch.bfloat16),
            zoo.batch("plain"),
            optimizer=outsize.AdamW(),
            method=outsize.OSFT(unfreeze_rank_ratio=0.25),
            device="sim:1GiB",
            plan=plan,
            chunk_bytes=cells.CHUNK_BYTES,
        )


def test_a_forecast_has_the_bytes_of_the_prepared_model() -> None:
    model = zoo.make("llama-untied", torch.bfloat16)
    batch = zoo.batch("llama-untied", size=2, tokens=16)
    settings: dict[str, Any] = {"method": HALF, "optimizer": outsize.AdamW(), "pins": outsize.Pins(n_optimizer_gpu=2)}
    found = outsize.plan(
        model.config, sequence_len=16, micro_batch_size=2, hardware="64MiB", chunk_bytes=CHUNK_BYTES, **settings
    )
    with closing(outsize.prepare(model, batch, device="sim:64MiB", chunk_bytes=CHUNK_BYTES, **settings)) as engine:
        assert found.plan.step_config.coordinates == engine.plan.step_config.coordinates != {}
        assert found.plan.estimate.gpu_parts == engine.plan.estimate.gpu_parts
        assert found.plan.estimate.host_bytes == engine.plan.estimate.host_bytes


def test_a_trainer_with_other_accumulation_does_not_begin_another_task_silently(tmp_path: Path) -> None:
    trainer = trainers.ours(tmp_path, args={"max_steps": 1}, method=HALF)
    with trainers.closing(trainer):
        trainer.train()
        hashes = trainer.engine.constant_hashes()
        trainer.args.gradient_accumulation_steps = 2
        for _ in range(2):
            with pytest.raises(ConfigError, match="changed after the model was trained with a method"):
                trainer.train()
        assert trainer.engine.constant_hashes() == hashes and trainer.engine.num_steps == 1
