"""TRL's trainers with our mixin equal the plain ones with the reference optimizer, to the bit.

Compared are losses, norms, weights, moments and TRL's own metrics, under a plan with everything resident and one with
everything streamed through two slots. Reference models are planned for, and what does not work is refused by name.
"""

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import trl_models
from torch import nn
from transformers import Trainer
from trl_models import length_reward, llama, tokenizer

from outsize.base.errors import ConfigError, DeviceOutOfMemory, EngineMisuse, PlanInfeasible
from outsize.integrations.arguments import refuse_trainer
from outsize.integrations.hf import OutsizeMixin
from outsize.integrations.others import OtherModel
from outsize.setup.request import PrepareRequest

trl, datasets, peft = (pytest.importorskip(name) for name in ("trl", "datasets", "peft"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TRL reports its use to the hub, but not from CI, and keeps log probabilities in the cache of datasets."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def rows(kind: str, **how: Any) -> Any:
    return datasets.Dataset.from_list(getattr(trl_models, kind)(**how))


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")


def saved(folder: Path) -> str:
    """A model on the disk: TRL loads its reference from there."""
    if not (folder / "model").exists():
        llama().save_pretrained(folder / "model")
    return str(folder / "model")


BASES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
ONLINE = {"max_completion_length": 8, "num_generations": 2}


def given(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a case gives to the trainer, and to its config."""
    kind, _, how = name.partition("-")
    args: dict[str, Any] = dict(ONLINE) if kind in ("grpo", "rloo") else {"max_length": 48}
    data = {"sft": "preferences", "dpo": "preferences", "kto": "thumbs", "reward": "preferences"}.get(kind, "prompts")
    made: dict[str, Any] = {"model": llama(scores=kind == "reward"), "train_dataset": rows(data)}
    if kind == "sft":
        made["train_dataset"] = datasets.Dataset.from_list(trl_models.chats(3, 9, 1, 7, 5, 8, 2, 4))
    if kind in ("grpo", "rloo"):
        made["reward_funcs"] = length_reward
    if how == "reference":
        made["ref_model"] = llama(seed=1)
    elif how in ("loaded", "kl"):
        made["model"], args = saved(folder), {**args, **({"beta": 0.1} if kind != "dpo" else {})}
    elif how == "lora":
        made["peft_config"] = lora()
        args |= {"beta": 0.1} if kind == "grpo" else {}
    elif how == "precomputed":
        args["precompute_ref_log_probs"] = True
    elif how == "autocast":
        made["ref_model"], args["bf16"] = llama(seed=1), True
    elif how == "window":
        made["model"] = saved(folder)
        args |= {
            "beta": 0.1,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "max_steps": 3,
            "num_iterations": 2,
        }
    elif how == "scored":
        made["reward_funcs"], made["reward_processing_classes"] = llama(seed=2, scores=True), tokenizer()
    return made, args


def config(kind: str, folder: Path, **args: Any) -> Any:
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
    return getattr(trl, f"{BASES[kind]}Config")(
        **{**kept, **more, "bf16": False, "gradient_checkpointing": False, **args}
    )


def build(
    name: str, folder: Path, *, with_outsize: bool, base: type = object, args: dict[str, Any] | None = None, **more: Any
) -> Any:
    kind = name.partition("-")[0]
    trainer: Any = getattr(trl, f"{BASES[kind]}Trainer")
    first: Any = OutsizeMixin if with_outsize else trainers.WithReference
    bases = (first, base, trainer) if base is not object else (first, trainer)
    made, own = given(name, folder)
    torch.manual_seed(0)
    where = folder / ("ours" if with_outsize else "plain")
    return type("Tested", bases, {})(
        args=config(kind, where, **own, **args or {}), processing_class=tokenizer(), **{**made, **more}
    )


def ours(name: str, folder: Path, plan: str = "streamed", **more: Any) -> Any:
    return build(name, folder, with_outsize=True, **{**trainers.planned(plan), **more})


def plain(name: str, folder: Path, **more: Any) -> Any:
    return build(name, folder, with_outsize=False, **more)


def logged(trainer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "step_time"} for entry in trainers.logged(trainer)]


CASES = {
    "sft": ("resident", "streamed"),
    "dpo-reference": ("resident", "streamed"),
    "dpo-loaded": ("streamed",),
    "dpo-lora": ("resident", "streamed"),
    "dpo-precomputed": ("streamed",),
    "dpo-autocast": ("mixed",),
    "kto-reference": ("resident", "streamed"),
    "kto-lora": ("streamed",),
    "reward": ("resident", "streamed"),
    "grpo": ("resident", "streamed"),
    "grpo-kl": ("resident", "streamed"),
    "grpo-lora": ("streamed",),
    "grpo-scored": ("streamed",),
    "grpo-window": ("streamed",),
    "rloo-kl": ("resident", "streamed"),
}


FULL = {
    ("sft", "resident"),
    ("dpo-reference", "resident"),
    ("dpo-precomputed", "streamed"),
    ("grpo", "resident"),
    ("grpo-scored", "streamed"),
    ("sft", "streamed"),
    ("grpo-window", "streamed"),
    ("dpo-autocast", "mixed"),
    ("grpo-lora", "streamed"),
    ("dpo-lora", "resident"),
    ("kto-reference", "resident"),
    ("kto-lora", "streamed"),
    ("reward", "resident"),
    ("grpo", "streamed"),
    ("grpo-kl", "resident"),
    ("rloo-kl", "resident"),
    ("rloo-kl", "streamed"),
    ("dpo-loaded", "streamed"),
}
"""Those that differ little from others."""


def cases() -> list[Any]:
    all_of_them = [(name, plan) for name, plans in CASES.items() for plan in plans]
    return [pytest.param(*case, marks=[pytest.mark.full] if case in FULL else []) for case in all_of_them]


@pytest.mark.parametrize(("name", "plan"), cases())
def test_training_equals_the_plain_trainer(name: str, plan: str, tmp_path: Path) -> None:
    reference = plain(name, tmp_path)
    expected = trainers.train(reference)
    with trainers.closing(ours(name, tmp_path, plan)) as trainer:
        cells.assert_same(trainers.train(trainer), expected)
        assert logged(trainer) == logged(reference), "the profiling run counted for nothing"
        assert [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry] == expected.norms, (
            "the real norms are logged"
        )
        has_other = name.endswith(("-reference", "-loaded", "-kl", "-autocast", "-scored", "-window"))
        assert [other.name for other in trainer._running] == (
            ["the reward model" if name == "grpo-scored" else "the reference model"] if has_other else []
        )
    assert not trainer._running and not any(
        param.is_meta for param in (getattr(trainer, "ref_model", None) or trainer.model).parameters()
    )


# A second model is part of the budget.


@pytest.mark.parametrize(
    "name", ["dpo-reference", *(pytest.param(name, marks=pytest.mark.full) for name in ("kto-reference", "grpo-kl"))]
)
def test_a_reference_model_and_the_model_stay_within_gpu_memory_together(name: str, tmp_path: Path) -> None:
    """With the least that does: both are streamed, `sim` refuses a byte too many, and the bits are the same."""

    def at(num_bytes: int) -> Any:
        machine = trainers.machine()
        longest = (
            {"sequence_len": 24} if name == "grpo-kl" else {}
        )  # a later prompt is longer than those of the first batch
        return ours(name, tmp_path, device=machine, gpu_memory=num_bytes, pins=None, **longest), machine

    with pytest.raises(
        PlanInfeasible,
        match=r"gpu_memory 19.5 KiB is too small: the reference model alone needs at least .* Raise gpu_memory, or",
    ) as first:
        at(20_000)[0].train()
    with pytest.raises(
        PlanInfeasible,
        match=r"the reference model needs .*, the trained model .*, together at least .* Raise gpu_memory",
    ) as both:
        at(first.value.needed_bytes)[0].train()
    # TRL's chunked log-probabilities allocate by the number of tokens that are not masked, which differs by batch.
    needed = both.value.needed_bytes + (1024 if name == "grpo-kl" else 0)
    trainer, machine = at(needed)
    with trainers.closing(trainer):
        assert trainer.preview().plan.gpu_budget_bytes < needed and not trainer._running
        found = trainers.train(trainer)
        (other,) = trainer._running
        assert {home.weights for home in other.engine.plan.decision.homes} == {"host"}
        assert sum(machine.budgets.values()) <= needed and other.gpu_bytes < sum(
            param.nbytes for param in trainer.model.parameters()
        )
        assert machine.observer.peak_bytes <= needed
    assert not machine.budgets
    cells.assert_same(found, trainers.train(plain(name, tmp_path)))


def test_a_reference_model_is_not_moved_to_the_device_by_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by accelerate nor by loading: TRL loads a reference with device_map=auto where there is a GPU."""
    moved: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "to", lambda self, *args, **kwargs: moved.append(self) or self)
    trainer = ours("dpo-reference", tmp_path)
    assert trainer.ref_model not in moved
    for model in (saved(tmp_path), type(llama()).from_pretrained(saved(tmp_path))):
        trainer = ours("dpo-loaded", tmp_path, model=model)
        assert trainer.args.model_init_kwargs == {"device_map": None} and trainer.ref_model not in moved


def test_reference_models_are_given_back_trainable_as_they_were(tmp_path: Path) -> None:
    reference = llama(seed=1)
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    with trainers.closing(ours("dpo-reference", tmp_path, ref_model=reference)) as trainer:
        trainer.train()
        assert not any(param.requires_grad for param in reference.parameters())
        with pytest.raises(
            EngineMisuse,
            match=r"No parameter of the prepared model requires grad, but an input does.* Call it under torch\.no_grad",
        ):
            reference(inputs_embeds=torch.ones(1, 2, 32, requires_grad=True))
    assert all(param.requires_grad for param in reference.parameters())
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())


def test_evaluation_runs_the_reference_model_too(tmp_path: Path) -> None:
    more = {
        "eval_dataset": rows("preferences", count=3),
        "args": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2},
    }
    reference = plain("dpo-reference", tmp_path, **more)
    expected = trainers.train(reference)
    with trainers.closing(ours("dpo-reference", tmp_path, **more)) as trainer:
        cells.assert_same(trainers.train(trainer), expected)
        assert logged(trainer) == logged(reference) and any(
            "eval_rewards/margins" in entry for entry in logged(trainer)
        )


@pytest.mark.parametrize("plan", ["streamed", pytest.param("resident", marks=pytest.mark.full)])
def test_sync_ref_model_mixes_the_trained_weights_into_the_reference(plan: str, tmp_path: Path) -> None:
    args = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    reference = plain("dpo-reference", tmp_path, args=args)
    expected = trainers.train(reference)
    with trainers.closing(ours("dpo-reference", tmp_path, plan, args=args)) as trainer:
        cells.assert_same(trainers.train(trainer), expected)
    for (name, found), wanted in zip(
        trainer.ref_model.named_parameters(), reference.ref_model.parameters(), strict=True
    ):
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("plan", ["streamed", pytest.param("resident", marks=pytest.mark.full)])
def test_the_adapter_that_is_disabled_gives_the_base_model(plan: str, tmp_path: Path) -> None:
    """With LoRA, TRL's reference is the policy itself without its adapter."""
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        base = llama()(input_ids=ids).logits
    with trainers.closing(ours("dpo-lora", tmp_path, plan)) as trainer:
        trainer.train()
        trainer.model.eval()
        with torch.no_grad():
            with trainer.model.disable_adapter():
                assert torch.equal(trainer.model(input_ids=ids).logits, base)
            assert not torch.equal(trainer.model(input_ids=ids).logits, base)


# Online.


class _RunsOut:
    """Device memory runs out in the backward of the fourth micro-batch, once."""

    left = 1

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        me: Any = self
        loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if (
            isinstance(self, OutsizeMixin)
            and me._step == 3
            and me._inputs is None
            and type(self).left
            and me.accelerator.sync_gradients
            and me._engine
        ):
            handle = me.model.model.layers[0].mlp.down_proj.weight.register_hook(self._raise)
            self._handle = handle
        return loss

    def _raise(self, grad: Any) -> None:
        type(self).left -= 1
        self._handle.remove()
        raise DeviceOutOfMemory("for the test")


def test_a_generated_micro_batch_that_runs_out_of_memory_is_made_again_with_the_same_completions(
    tmp_path: Path,
) -> None:
    """The earlier one of its step, too, which has another slice of the completions."""
    expected = trainers.train(plain("grpo-window", tmp_path))
    with trainers.closing(ours("grpo-window", tmp_path, base=_RunsOut)) as trainer:
        found = trainers.train(trainer)
        assert type(trainer).left == 0
    cells.assert_same(found, expected)


def test_longer_prompts_than_the_first_batch_has_are_planned_for(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": trl_models.question(n)} for n in (1, 1, 30, 2)])
    more = {"train_dataset": data, "args": {"shuffle_dataset": False}}
    expected = trainers.train(plain("grpo", tmp_path, **more))
    with trainers.closing(ours("grpo", tmp_path, "resident", **more)) as trainer:
        first = trainer.preview().plan.inputs["input_ids"]
        cells.assert_same(trainers.train(trainer), expected)
        assert trainer.engine.plan.inputs["input_ids"][1] > first[1] == 9 + 8


# Refusals.


@pytest.mark.parametrize("argument", ["use_vllm", "use_transformers_continuous_batching", "use_adaptive_entropy"])
def test_ways_of_generating_outside_of_the_plan_are_refused_by_name(argument: str, tmp_path: Path) -> None:
    args = config("grpo", tmp_path, **ONLINE)
    setattr(args, argument, True)
    with pytest.raises(
        ConfigError, match=rf"These arguments do not work with outsize. {argument}=True: .*; leave it out"
    ):
        type("Tested", (OutsizeMixin, trl.GRPOTrainer), {})(
            model=llama(), args=args, reward_funcs=length_reward, train_dataset=rows("prompts")
        )


def test_trainers_that_run_a_second_model_in_ways_of_their_own_are_refused_by_name() -> None:
    base = type("OnlineDPOTrainer", (Trainer,), {"__module__": "trl.experimental.online_dpo"})
    with pytest.raises(
        ConfigError,
        match=r"OnlineDPOTrainer does not work with outsize: it runs a second model.* Use SFTTrainer, .*GRPOTrainer",
    ):
        type("Tested", (OutsizeMixin, base), {})(model=llama())
    refuse_trainer(type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer"}))


def test_a_loader_of_lists_is_refused_in_words(tmp_path: Path) -> None:
    trainer = trainers.ours(tmp_path, data_collator=lambda batch: batch)
    with pytest.raises(ConfigError, match=r"its training batches are a list, not a dict of tensors. Pass plan_batch"):
        trainer.train()


def test_an_other_model_that_cannot_be_prepared_stays_trainable() -> None:
    model = llama()
    request = PrepareRequest(gpu_memory=1000, device=trainers.machine(), chunk_bytes=2**14)
    with pytest.raises(PlanInfeasible):
        OtherModel(model, "the teacher", {"input_ids": torch.ones(1, 4, dtype=torch.long)}, request)
    assert all(param.requires_grad for param in model.parameters())
