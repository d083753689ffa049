"""The loss in chunks under every plan: the same bits as the plain model with the same loss, and every byte as promised.

Chunks are of five tokens here, so that one row has several and one chunk has parts of two rows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from cells import Cell
from torch import nn
from turns import by_turns, in_turn

import outsize
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.integrations.hf import OutsizeMixin
from outsize.loss import chunked_loss as chosen
from outsize.loss.chunked_loss import ChunkedLossPatch
from outsize.loss.logits import Logits
from outsize.runtime.engine import Engine
from outsize.schedule.pins import Pins
from outsize.setup.prepare import preview

CHUNK = 5
WORDS = "in chunks of 5 tokens"
STEPS = 3


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "chunk_tokens", lambda vocab_size: CHUNK)


def machine(num_bytes: int = 2**30) -> SimDevice:
    return SimDevice(lookup(f"{num_bytes}B"))


def plain(model: nn.Module, cell: Cell) -> cells.Outcome:
    ChunkedLossPatch(model).attach()
    return cells.plain(
        model,
        cells.batches(cell.kind, 3),
        spec=cell.spec,
        steps=STEPS,
        accumulate=cell.accumulate,
        autocast=cell.autocast,
    )


def prepare(model: nn.Module, cell: Cell, device: Any, **how: Any) -> Engine:
    """As a user would."""
    with torch.autocast("cpu", torch.bfloat16, enabled=cell.autocast):
        return outsize.prepare(
            model,
            zoo.batch(cell.kind),
            device=device,
            chunk_bytes=4096,
            optimizer=cell.spec,
            accumulate=cell.accumulate,
            **how,
        )


CELLS = [
    Cell(kind="llama", clip=True),
    Cell(kind="llama-untied", dtype="bf16", update="in_backward"),
    Cell(kind="gemma2", dtype="bf16", accumulate=2),
    Cell(kind="gpt2", frozen="scattered", autocast=True),
    Cell(kind="mixtral", dtype="bf16"),
    Cell(kind="qwen3", frozen="prefix", update="declared"),
]
PINS = {
    "resident": None,
    "streamed": Pins(n_persist=0, n_buffer=2, n_optimizer_gpu=0, n_checkpoint=3),
    "mixed": Pins(n_persist=2, n_swap=1, n_offload=1),
}


@pytest.mark.parametrize("cell", in_turn(CELLS), ids=str)
@pytest.mark.parametrize("device", ["sim", pytest.param("cpu", marks=pytest.mark.full)])
def test_all_plans_have_the_bits_of_the_plain_model_with_this_loss(
    cell: Cell, device: str, parity_cell: Callable[[object], None]
) -> None:
    expected = plain(cell.model(), cell)
    for pins in PINS:
        where = machine() if device == "sim" else "cpu"
        with cells.closing(prepare(cell.model(), cell, where, pins=PINS[pins])) as engine:
            assert engine.plan.loss == WORDS
            cells.assert_same(cells.train_cell(cell, engine, steps=STEPS), expected)
            if device == "sim":
                assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
        parity_cell((str(cell), device, pins))


@pytest.mark.parametrize(
    ("cell", "strategy"),
    by_turns([Cell(kind="llama"), Cell(kind="llama-untied", dtype="bf16")], ["keep", "recompute", "offload", "swap"]),
    ids=str,
)
def test_every_strategy_does_under_exactly_its_budget(
    cell: Cell, strategy: Any, parity_cell: Callable[[object], None]
) -> None:
    model = cell.model()
    ChunkedLossPatch(model).attach()
    how: Any = dict(spec=cell.spec, device=machine(), budget=None, strategy=strategy, weights="host", optimizer="host")
    with cells.closing(cells.prepare_by_hand(model, zoo.batch(cell.kind), **how)) as engine:
        cells.assert_same(cells.train_cell(cell, engine, steps=STEPS), plain(cell.model(), cell))
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
    parity_cell((str(cell), strategy))


def test_it_takes_less_memory_than_full_logits() -> None:
    """Which are there in bf16, and twice in fp32. The gradient of the head's weight is there a little longer
    instead.
    """
    plans = [
        preview(
            zoo.make("llama", torch.bfloat16), zoo.batch("llama", tokens=64), device=machine(), chunked_loss=how
        ).plan
        for how in (None, False)
    ]
    ours, full = (plan.work[-1].forward_peak_bytes for plan in plans)
    assert full > 10 * 128 * zoo.VOCAB and ours < full / 2


def test_an_adapter_over_a_streamed_base_has_the_same_bits(parity_cell: Callable[[object], None]) -> None:
    peft = pytest.importorskip("peft")
    cell = Cell(kind="llama", dtype="bf16", accumulate=2)

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = peft.get_peft_model(cell.model(), peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
        for name, param in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.1)
        return made.train()

    expected = plain(model(), cell)
    with cells.closing(prepare(model(), cell, machine(), pins=Pins(n_persist=0, n_checkpoint=4))) as engine:
        assert engine.plan.loss == WORDS
        cells.assert_same(cells.train_cell(cell, engine, steps=STEPS), expected)
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
    parity_cell("lora")


def test_a_larger_batch_turns_it_on_in_its_own_forward_and_a_smaller_one_does_not_turn_it_off() -> None:
    small, large = zoo.batch("llama", size=1, tokens=4), zoo.batch("llama", size=2, tokens=16)
    with cells.closing(outsize.prepare(zoo.make("llama"), small, device=machine(), chunk_bytes=4096)) as engine:
        assert engine.plan.loss == "full logits: 4 tokens are no more than a chunk of 5"
        for given, is_in_chunks in ((small, False), (large, True), (small, True)):
            out = engine.model(**given)
            assert isinstance(out.logits, Logits) == is_in_chunks
            out.loss.backward()
            engine.optimizer.step()
            assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes
        assert engine.plan.loss == WORDS
        out = engine.model(**zoo.batch("llama", size=4, tokens=16))  # planned again, while on
        assert isinstance(out.logits, Logits)
        del out
    assert not {"forward", "_loss_function"} & vars(engine.model).keys() and "forward" not in vars(engine.model.lm_head)


def test_evaluation_between_steps_has_logits() -> None:
    with cells.closing(
        outsize.prepare(zoo.make("llama"), zoo.batch("llama"), device=machine(), pins=Pins(n_persist=0))
    ) as engine:
        plain_model = zoo.make("llama").eval()
        engine.model.eval()
        with torch.no_grad():
            assert torch.equal(engine.model(**zoo.batch("llama")).logits, plain_model(**zoo.batch("llama")).logits)


# --- Trainer


def ours(folder: Path, plan: str = "resident", **how: Any) -> Any:
    return trainers.ours(folder, plan=plan, **how)


@pytest.mark.parametrize("bf16", in_turn([True, False]), ids=["autocast", ""])
def test_trainers_have_the_bits_of_the_plain_trainer_with_this_loss(
    tmp_path: Path, bf16: bool, parity_cell: Callable[[object], None]
) -> None:
    args = {"bf16": bf16, "gradient_accumulation_steps": 2}
    model = zoo.make("llama")
    ChunkedLossPatch(model).attach()
    expected = trainers.train(
        trainers.PlainTrainer(
            model=model, args=trainers.arguments(tmp_path / "plain", **args), train_dataset=trainers.rows()
        )
    )
    for plan in trainers.PINS:
        with trainers.closing(ours(tmp_path / plan, plan, args=args, eval_dataset=trainers.rows(count=2))) as trainer:
            found = trainers.train(trainer)
            assert trainer.engine.plan.loss == WORDS
            trainer.evaluate()
        cells.assert_same(found, expected)
        parity_cell(("trainer", plan, bf16))


def test_a_trainer_that_makes_its_own_loss_keeps_its_logits(tmp_path: Path) -> None:
    class Reads(trainers.OutsizeTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
            self.seen = outputs.logits.argmax(-1)
            return loss

    args = trainers.arguments(tmp_path, max_steps=1)
    made = Reads(model=zoo.make("llama"), args=args, train_dataset=trainers.rows(), **trainers.planned("resident"))
    smooth = ours(tmp_path, args={"label_smoothing_factor": 0.1, "max_steps": 1})
    off = ours(tmp_path, args={"max_steps": 1}, chunked_loss=False)
    words = []
    for trainer in (made, smooth, off):
        with trainers.closing(trainer):
            trainer.train()
            words.append(trainer.engine.plan.loss)
    assert words == ["full logits: the loop computes its own loss"] * 2 + ["full logits, as requested"]


def test_trl_keeps_its_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    monkeypatch.setenv("CI", "1")
    from parity.test_trl import tokenizer

    class Sft(OutsizeMixin, trl.SFTTrainer):
        pass

    given: Any = dict(
        output_dir=str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_length=32,
        dataloader_pin_memory=False,
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in trainers.rows()])
    trainer: Any = Sft(
        model=zoo.make("llama"),
        args=trl.SFTConfig(**given),
        train_dataset=data,
        processing_class=tokenizer(),
        **trainers.planned("resident"),
    )
    with trainers.closing(trainer):
        trainer.train()
        assert trainer.engine.plan.loss == "full logits: the loop computes its own loss"


def test_yaml_says_whether(tmp_path: Path) -> None:
    import folders

    from outsize.config.read import read_config
    from outsize.run.assemble import assemble, start

    yaml = folders.write_run(tmp_path, max_steps=1)
    for value, words in (("null", WORDS), ("false", "full logits, as requested"), ("true", WORDS)):
        assembled = assemble(config := read_config(yaml, [f"chunked_loss={value}"]))
        with trainers.closing(assembled.trainer):
            start(assembled, config)
            assert assembled.trainer.engine.plan.loss == words
        assert (
            json.loads(json.dumps(assembled.trainer.fingerprint))["chunked_loss"]
            == {"null": None, "false": False, "true": True}[value]
        )


def test_what_is_wrapped_around_the_model_after_prepare_stays_around_it(_profiles_anew: None) -> None:
    """accelerate wraps a model's forward in autocast. A re-plan takes our part out and in again, and must not take that
    along.
    """
    model: Any = zoo.make("llama")
    engine = outsize.prepare(model, zoo.batch("llama"), device="cpu")
    with cells.closing(engine):
        seen: list[bool] = []
        inner = model.forward
        model.forward = lambda *args, **kwargs: (seen.append(True), inner(*args, **kwargs))[1]
        for size in (2, 3, 3):
            model(**zoo.batch("llama", size=size)).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert engine.plan.inputs["input_ids"][0] == 3 and sum(seen) >= 3
        number = len(seen)
    model(**zoo.batch("llama"))
    assert len(seen) == number + 1, "nor does detach"


def test_a_resumed_run_continues_with_its_loss_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that have grown beyond a chunk turned it on; those after the resume would not."""
    monkeypatch.setattr(chosen, "chunk_tokens", lambda vocab_size: 40)
    rows = [
        row for tokens in (16, 24, 16) for row in trainers.rows("llama", 4, tokens=tokens)
    ]  # 32, 48 and 32 tokens a batch
    monkeypatch.setattr(
        trainers.OutsizeTrainer, "_get_train_sampler", lambda self, *_: torch.utils.data.SequentialSampler(rows)
    )
    found = []
    for parts in ([6], [4, 6]):
        for steps in parts:
            args = dict(max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
            trainer = trainers.ours(tmp_path / str(len(parts)), args=args, train_dataset=rows)
            with trainers.closing(trainer):
                trainer.train(resume_from_checkpoint=steps > parts[0])
                assert trainer.engine.plan.loss_chunk == 40
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append(losses)
    assert found[0] == found[1] and len(losses) == 6
