"""TRL's SFTTrainer with our mixin equals the plain SFTTrainer with the reference optimizer: losses, weights, moments
and TRL's own metrics, to the bit.

The loss is made outside of the model (TRL's fused head gives log-probabilities), so the profiling run goes through TRL's
own code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import trl_models
from trl_models import llama, tokenizer

from outsize.integrations.hf import OutsizeMixin

trl, datasets, peft = (pytest.importorskip(name) for name in ("trl", "datasets", "peft"))


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports its use to the hub, but not from CI."""
    monkeypatch.setenv("CI", "1")


class Sft(OutsizeMixin, trl.SFTTrainer):
    pass


class PlainSft(trainers.WithReference, trl.SFTTrainer):
    pass


def chats(*lengths: int) -> Any:
    """A question of so many letters, and an answer."""
    return datasets.Dataset.from_list(trl_models.chats(*lengths))


def arguments(folder: Path, **given: Any) -> Any:
    usual = trainers.arguments(folder)
    same = (
        "per_device_train_batch_size",
        "max_steps",
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "logging_steps",
        "dataloader_pin_memory",
    )
    kept = {name: getattr(usual, name) for name in same}
    more: dict[str, Any] = dict(
        output_dir=str(folder / "out"), save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    return trl.SFTConfig(**{**kept, **more, "bf16": False, "gradient_checkpointing": False, "max_length": 48, **given})


def ours(
    folder: Path, *, model: Any = None, plan: str = "streamed", args: dict[str, Any] | None = None, **given: Any
) -> Sft:
    settings = {
        "train_dataset": chats(3, 9, 1, 7, 5, 8, 2, 4),
        "processing_class": tokenizer(),
        **trainers.planned(plan),
        **given,
    }
    return Sft(model=model or llama(), args=arguments(folder, **args or {}), **settings)


def plain(folder: Path, *, model: Any = None, args: dict[str, Any] | None = None, **given: Any) -> PlainSft:
    settings = {"train_dataset": chats(3, 9, 1, 7, 5, 8, 2, 4), "processing_class": tokenizer(), **given}
    return PlainSft(model=model or llama(), args=arguments(folder / "plain", **args or {}), **settings)


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")


CASES: dict[str, dict[str, Any]] = {
    "chat": {"plans": ("resident", "streamed")},
    "bf16": {"plans": ("mixed",), "dtype": torch.bfloat16, "args": {"max_grad_norm": 0.0}},
    "packed": {"plans": ("mixed",), "args": {"packing": True, "gradient_accumulation_steps": 2, "max_steps": 2}},
    "assistant": {
        "plans": ("streamed",),
        "args": {"assistant_only_loss": True, "gradient_accumulation_steps": 2, "max_steps": 2},
    },
    "lora": {
        "plans": ("mixed",),
        "lora": True,
        "dtype": torch.bfloat16,
        "args": {"gradient_accumulation_steps": 2, "max_steps": 2},
    },
    "lora-packed": {"plans": ("resident",), "lora": True, "args": {"packing": True}},
}


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, case in CASES.items() for plan in case["plans"]])
def test_training_equals_the_plain_sft_trainer(
    name: str, plan: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    case = CASES[name]
    given = {"args": case.get("args"), **({"peft_config": lora()} if "lora" in case else {})}
    reference = plain(tmp_path, model=llama(case.get("dtype", torch.float32)), **given)
    expected = trainers.train(reference)
    with trainers.closing(ours(tmp_path, model=llama(case.get("dtype", torch.float32)), plan=plan, **given)) as trainer:
        cells.assert_same(trainers.train(trainer), expected)
        assert {"loss", "mean_token_accuracy", "entropy", "num_tokens"} <= trainers.logged(trainer)[0].keys()
        assert trainers.logged(trainer) == trainers.logged(reference), "the profiling run counted for nothing"
        rows, tokens = trainer.engine.plan.inputs["input_ids"]
        longest = max(map(len, trainer.train_dataset["input_ids"]))
        assert (rows, tokens) == ((1, 2 * longest) if trainer.args.packing else (2, longest))
    parity_cell((name, plan))


def test_checkpointing_and_autocast_that_trl_turns_on_by_habit_are_ours_to_decide(
    tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """SFTConfig has both on by default."""
    args = {"bf16": None, "gradient_checkpointing": True}
    expected = trainers.train(plain(tmp_path, args={**args, "gradient_checkpointing": False}))
    with trainers.closing(ours(tmp_path, args=args)) as trainer:
        assert trainer.args.bf16 and not trainer.args.gradient_checkpointing
        cells.assert_same(trainers.train(trainer), expected)
    parity_cell("autocast")


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_with_more_tokens_or_more_documents_than_planned_is_planned_for(
    packing: bool, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """Documents that end in more places are told to the model in longer tensors. (Packing puts the longest first.)"""
    lengths = (20, 20, 1, 1, 1, 1, 1, 1) if packing else (1, 1, 2, 2, 20, 20, 1, 1)
    args = {
        "packing": packing,
        "max_length": 48 if packing else None,
        "train_sampling_strategy": "sequential",
        "max_steps": 3,
    }
    expected = trainers.train(plain(tmp_path, args=args, train_dataset=chats(*lengths)))
    with trainers.closing(ours(tmp_path, args=args, train_dataset=chats(*lengths), plan="resident")) as trainer:
        first = trainer.preview().plan.inputs["input_ids"]
        cells.assert_same(trainers.train(trainer), expected)
        assert packing or trainer.engine.plan.inputs["input_ids"][1] > first[1]
    parity_cell(("re-planned", packing))


def test_an_adapter_continues_under_another_plan_and_loads_with_stock_peft(
    tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    args = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    reference = plain(tmp_path, peft_config=lora())
    expected = trainers.train(reference)
    for plan, start in (("mixed", None), ("resident", str(tmp_path / "out" / "checkpoint-2"))):
        given = {"plan": plan, "peft_config": lora(), "eval_dataset": chats(6, 2, 3)}
        with trainers.closing(ours(tmp_path, args=args, **given)) as trainer:
            found = trainers.train(trainer, resume_from_checkpoint=start)
            trainer.save_model(str(tmp_path / plan))
        cells.assert_same(
            cells.Outcome(
                found.losses, expected.norms[: 4 - len(found.norms)] + found.norms, found.weights, found.state
            ),
            expected,
        )
        parity_cell(("resumed" if start else "saved", plan))
        ids = torch.tensor([[5, 6, 7]])
        for folder in (tmp_path / plan, tmp_path / "out" / "checkpoint-4"):
            loaded = peft.PeftModel.from_pretrained(llama(), folder).eval()
            assert torch.equal(loaded(input_ids=ids).logits, reference.model.eval()(input_ids=ids).logits)
            pickles = {path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")}
            assert pickles <= {"optimizer.pt", "scheduler.pt"}, "these hold no tensors: see test_checkpoints.py"


def test_a_model_given_by_name_is_loaded_onto_the_cpu(tmp_path: Path) -> None:
    """TRL loads it before we see it, by default onto every GPU there is."""
    llama().save_pretrained(tmp_path / "model")
    trainer = ours(tmp_path, model=str(tmp_path / "model"), plan="resident")
    assert trainer.args.model_init_kwargs == {"device_map": None}
    with trainers.closing(trainer):
        assert trainers.train(trainer).losses == trainers.train(plain(tmp_path, model=str(tmp_path / "model"))).losses
