"""The profiling run of `prepare` on a card that is too small for it, and the choice of a micro-batch on a device that is
there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cells
import pytest
import torch
import zoo
from peft import LoraConfig, get_peft_model

import outsize
from outsize.base.errors import ConfigError, DeviceOutOfMemory, PlanInfeasible
from outsize.device.observer import Observer, push_mode, remove_mode
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.setup.micro_batch import Split, splits_of
from outsize.setup.prepare import choose_micro_batch, preview
from outsize.setup.request import PrepareRequest

HOW: dict[str, Any] = dict(host_memory="1GiB", chunk_bytes="8KiB")
LITTLE = 600 * 1024
"""Of 8 × 16 tokens, a plan fits; its profiling run does not, and those of 4 rows and 2 do."""


@pytest.mark.parametrize("accumulate", [0, -2, 1.5, True])
def test_passes_that_are_no_number_are_refused(accumulate: Any) -> None:
    model = zoo.make("llama")
    with pytest.raises(ConfigError, match=f"accumulate must be a whole number from 1, not {accumulate}"):
        outsize.prepare(model, zoo.batch("llama", size=2), device="sim:64MiB", accumulate=accumulate)


class Card(SimDevice):
    """`sim` with a limit on profiling runs, as a real card has one."""

    def __init__(self, size: str) -> None:
        super().__init__(lookup(size))
        self.limits: list[int] = []

    def limit(self, num_bytes: int) -> None:
        self.limits.append(num_bytes)

    @contextmanager
    def meter(self) -> Iterator[Observer]:
        most = self.limits[-1]

        def birth(num_bytes: int, live_bytes: int) -> None:
            if live_bytes > most:
                raise DeviceOutOfMemory(f"{live_bytes} bytes are live, more than {most}. Raise gpu_memory.")

        observer = Observer(birth)
        push_mode(observer)
        try:
            yield observer
        finally:
            remove_mode(observer)


def test_a_trial_that_does_not_fit_is_scaled_from_fewer_rows_and_the_plan_is_as_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = zoo.batch("llama", size=8)
    spec = outsize.AdamW(lr=1e-2)
    expected = cells.plain(zoo.make("llama"), [batch], spec=spec, steps=2)
    measured = preview(zoo.make("llama"), batch, device=SimDevice(lookup("64MiB")), gpu_memory=LITTLE, **HOW).plan
    card = Card(f"{LITTLE}B")
    model = zoo.make("llama")
    with (
        caplog.at_level(logging.WARNING),
        cells.closing(outsize.prepare(model, batch, optimizer=spec, device=card, **HOW)) as engine,
    ):
        assert (
            "the profiling run of 8 rows does not fit the device: its numbers are scaled from 4 and 2 rows"
            in caplog.text
        )
        assert "scaled to 8 rows from 2 and 4" in engine.plan.provenance
        assert engine.plan.decision == measured.decision and engine.plan.inputs == measured.inputs
        assert engine.plan.estimate.gpu_bytes == measured.estimate.gpu_bytes
        assert engine.plan.estimate.step_seconds == pytest.approx(measured.estimate.step_seconds, rel=1e-3)
        got = cells.train(model, engine.optimizer, [batch], steps=2, accumulate=1, engine=engine)
        assert card.observer.peak_bytes == engine.plan.estimate.gpu_bytes <= LITTLE
    cells.assert_same(got, expected)
    assert set(card.limits) == {LITTLE}


@pytest.mark.parametrize("name", ["llama", "llava"])
def test_what_cannot_be_halved_borrows_of_a_larger_card_and_fails_on_a_small_one(name: str) -> None:
    """Two rows have only one smaller size, and rows with images are not cut."""
    batch = zoo.batch(name, size=2 if name == "llama" else 8)
    with pytest.raises(PlanInfeasible) as least:
        preview(zoo.make(name), batch, device=SimDevice(lookup("64MiB")), gpu_memory=1, **HOW)
    enough = least.value.needed_bytes
    card = Card("64MiB")
    assert preview(zoo.make(name), batch, device=card, gpu_memory=enough, **HOW).plan.estimate.gpu_bytes <= enough
    assert card.limits == [enough, 64 * 2**20, enough]
    small = Card(f"{enough}B")
    with pytest.raises(DeviceOutOfMemory, match="bytes are live, more than"):
        preview(zoo.make(name), batch, device=small, **HOW)
    assert set(small.limits) == {enough}


# --- micro-batches


def test_the_micro_batch_that_is_chosen_is_the_fastest_of_all_plans() -> None:
    def optimizer_for(split: Split) -> outsize.AdamW:
        return outsize.AdamW(update="after_step" if split.passes > 1 else "in_backward")

    def batch_of(rows: int) -> Any:
        return zoo.batch("one-block", size=rows)

    model = zoo.make("one-block")
    splits = splits_of(8, None, None)
    for size in ("200KiB", "64MiB"):
        how: dict[str, Any] = dict(device=SimDevice(lookup(size)), **HOW)
        seconds = {}
        for split in splits:
            try:
                planned = preview(
                    model, batch_of(split.rows), optimizer=optimizer_for(split), accumulate=split.passes, **how
                )
                seconds[split] = planned.plan.estimate.step_seconds
            except PlanInfeasible:
                break
        chosen = choose_micro_batch(
            model, splits, PrepareRequest(**how), batch_of=batch_of, optimizer_for=optimizer_for
        )
        plan = chosen.answer.plan
        assert plan.estimate.step_seconds == seconds[chosen.split] <= min(seconds.values()) * 1.01
        assert (
            plan.inputs["input_ids"] == (chosen.split.rows, 16) and plan.step_config.accumulate == chosen.split.passes
        )
        assert plan.step_config.update == optimizer_for(chosen.split).update and "scaled" not in plan.provenance
        assert ("8 × 1 does not fit" in chosen.words) == (Split(rows=8, passes=1) not in seconds) == (size == "200KiB")


@pytest.mark.parametrize("is_fp32", [True, False])
def test_fp32_lora_weights_over_a_bf16_base_get_a_note_with_their_cost(
    is_fp32: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(zoo.make("llama", torch.bfloat16), settings, autocast_adapter_dtype=is_fp32)
    outsize.prepare(model, zoo.batch("llama"), device="sim:64MiB", **HOW).close()
    assert ("autocast_adapter_dtype=False" in caplog.text) == is_fp32
