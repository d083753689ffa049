"""OSFT beyond single steps: tasks, accumulation, other batches, and what user code does between steps."""

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from cells import CHUNK_BYTES, closing
from osft_runs import HALF, MIXED, PLANS, TIGHT, assert_equal, named_state, prepare, step, uninterrupted, values
from torch import Tensor, nn

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, PlanInfeasible
from outsize.schedule.plan import Plan


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


def test_evaluation_on_an_earlier_task_reports_what_is_forgotten(tmp_path: Path) -> None:
    held_out = {"old": trainers.rows("llama", 2), "new": trainers.rows("llama", 3)}
    args = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2}
    trainer = trainers.ours(tmp_path, args=args, method=HALF, eval_dataset=held_out)
    with trainers.closing(trainer):
        trainer.train()
        before = trainer.evaluate()["eval_old_loss"]
        trainer.engine.next_task()
        assert trainer.evaluate()["eval_old_loss"] == before, "the next task begins with the same model"
        trainer.train()
        losses = [entry["eval_old_loss"] for entry in trainer.state.log_history if "eval_old_loss" in entry]
    assert len(losses) == 2 and losses[0] != before != losses[1]
