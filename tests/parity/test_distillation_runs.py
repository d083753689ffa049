"""Runs with `teacher_model`: the bits of a plain Trainer that runs both models whole."""

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import trainers
import zoo
from rich.console import Console
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, Trainer, set_seed

from outsize.base.errors import ConfigError, PlanInfeasible
from outsize.config.read import read_config
from outsize.loss.distillation import Mixture, TeacherHead, distillation
from outsize.run.assemble import assemble, training_arguments
from outsize.run.distill import load_teacher
from outsize.run.plan import plan_request
from outsize.run.train import train_run

STREAMED = ["device=sim:16MiB", "plan.n_persist=0", "plan.n_optimizer_gpu=0"]


def write_run(folder: Path, teacher: str = "gemma2", **keys: Any) -> Path:
    if not (folder / "teacher").exists():
        folders.write_model(folder / "teacher", teacher)
    return folders.write_run(folder, **{"teacher_model": str(folder / "teacher"), "save_steps": 2, **keys})


def train(yaml: Path, *changes: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    config = read_config(yaml, changes)
    console = Console(record=True, width=200, file=io.StringIO())
    outcome = train_run(config, console)
    (file,) = Path(config.output_dir).glob("*model.safetensors")
    assert not outcome.planned_gpu_bytes or outcome.gpu_peak_bytes <= outcome.planned_gpu_bytes
    return [loss for _, loss in outcome.losses], load_file(file), console.export_text()


class Plain(trainers.WithReference, Trainer):
    """Both models whole, no engine."""

    teacher: Any
    mixture: Mixture
    seen: list[tuple[float, float]]

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **how: Any) -> Any:
        labels = torch.nn.functional.pad(inputs.pop("labels"), (0, 1), value=-100)[..., 1:]
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        with torch.no_grad():
            theirs = self.teacher.model(**inputs, use_cache=False).last_hidden_state
            logits, expected = model.lm_head(hidden).float(), self.teacher(**inputs).logits.float()
        cap = self.teacher.config.final_logit_softcapping
        head = TeacherHead(self.teacher.lm_head.weight, None, (("div", cap), ("tanh", None), ("mul", cap)))
        number = how["num_items_in_batch"]
        loss = distillation(
            hidden.flatten(0, 1),
            model.lm_head.weight,
            None,
            theirs.flatten(0, 1),
            head,
            labels.flatten(),
            mixture=self.mixture,
            chunk=256,
            num_items=number,
        )
        rows, t = labels != -100, self.mixture.temperature
        own, wanted = ((x / t).log_softmax(-1)[rows] for x in (logits, expected))
        kl = kl_div(own, wanted, log_target=True, reduction="sum") * t**2
        ce = cross_entropy(logits[rows], labels[rows], reduction="sum")
        self.seen.append((loss.item(), ((self.mixture.alpha * kl + (1 - self.mixture.alpha) * ce) / number).item()))
        return loss


def plain(yaml: Path, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = read_config(yaml, [f"output_dir={folder / 'plain'}", "save_strategy=no", "save_steps=null"])
    data = assemble(config).trainer
    set_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(config.base_model, dtype=torch.bfloat16)
    trainer = Plain(
        model=model,
        args=training_arguments(config, on_gpu=False),
        train_dataset=data.train_dataset,
        data_collator=data.data_collator,
    )
    trainer.teacher = AutoModelForCausalLM.from_pretrained(str(config.teacher_model), dtype=torch.bfloat16).eval()
    trainer.mixture, trainer.seen = Mixture(config.kd_alpha, config.kd_temperature), []
    trainer.model_accepts_loss_kwargs = True
    trainer.train()
    for found, expected in trainer.seen:
        assert found == pytest.approx(expected, rel=2e-3)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, dict(trainer.model.state_dict())


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="kl", marks=pytest.mark.full),
        pytest.param({"kd_alpha": 0.5, "kd_temperature": 2.0}, id="mixed"),
    ],
)
def test_a_run_equals_a_plain_trainer_and_resumes(
    tmp_path: Path, keys: dict[str, Any], parity_cell: Callable[[object], None]
) -> None:
    yaml = write_run(tmp_path, **keys)
    expected, weights = plain(yaml, tmp_path)
    losses, exported, text = train(yaml, *STREAMED)
    assert losses == expected and len(set(losses)) == 4
    assert exported and all(torch.equal(value, weights[name]) for name, value in exported.items())
    assert "the teacher has" in text
    parity_cell(("distillation", *keys))
    if not keys:
        return
    resumed, again, _ = train(yaml, "device=cpu", f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-2'}")
    assert resumed == expected[2:] and all(torch.equal(value, again[name]) for name, value in exported.items())
    parity_cell(("distillation", "resumed"))
    yaml.write_text(yaml.read_text().replace("kd_alpha: 0.5", "kd_alpha: 0.25"))
    with pytest.raises(ConfigError, match=r"kd_alpha was 0\.5 and is 0\.25"):
        assemble(read_config(yaml, ["resume_from_checkpoint=true"]))


def test_with_lora_evaluation_and_a_chosen_micro_batch(tmp_path: Path) -> None:
    """Evaluation is the cross-entropy of the data, without the teacher."""
    lora = {"adapter": "lora", "lora_r": 2, "lora_target_linear": True}
    split = {"batch_size": 2, "micro_batch_size": None, "gradient_accumulation_steps": None}
    yaml = write_run(tmp_path, **lora, **split, val_set_size=4, eval_steps=2, max_steps=2)
    losses, adapter, text = train(yaml, "device=sim:16MiB", "save_steps=null")
    assert adapter and text.count("eval loss") == 1 and len(losses) == 2


def test_the_budget_is_of_both_models(tmp_path: Path) -> None:
    yaml = write_run(tmp_path)
    budget = 64 * 1024
    for _ in range(3):
        try:
            train(yaml, "device=sim:16MiB", f"gpu_memory={budget}B", "max_steps=1")
            break
        except PlanInfeasible as error:
            assert "the teacher" in str(error) and error.needed_bytes > budget
            budget = error.needed_bytes
    else:
        pytest.fail(f"{budget} bytes are what the last message asked for")
    # What is needed is needed: with one KiB less the run is refused.
    with pytest.raises(PlanInfeasible):
        train(yaml, "device=sim:16MiB", f"gpu_memory={budget - 1024}B", "max_steps=1")


def test_refusals(tmp_path: Path) -> None:
    def refused(match: str, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            assemble(read_config(write_run(tmp_path, **keys)))

    refused("teacher_model: .*missing: there is no such folder", teacher_model=str(tmp_path / "missing"))
    refused("kd_alpha: has no effect without teacher_model", teacher_model=None, kd_alpha=0.5)
    refused("computed in chunks", chunked_loss=False)
    refused("with rl: dpo", rl="dpo")
    folders.write_model(tmp_path / "encoder", "t5")
    refused("no language model with one output head", teacher_model=str(tmp_path / "encoder"))


def test_packed_rows(tmp_path: Path) -> None:
    """The teacher keeps documents apart too: its hidden states in a packed row are those of each document alone."""
    yaml = write_run(tmp_path, "qwen3", sample_packing=True, sequence_len=128, max_steps=1)
    trainer = assemble(read_config(yaml)).trainer
    row = trainer.data_collator([trainer.train_dataset[0]])
    given = {name: value for name, value in row.items() if name != "labels"}
    starts = [*(given["position_ids"][0] == 0).nonzero().flatten().tolist(), given["input_ids"].shape[1]]
    assert len(starts) > 3
    with torch.no_grad():
        packed = trainer._teacher.backbone(**given, use_cache=False).last_hidden_state[0]
        for start, stop in itertools.pairwise(starts):
            one = {
                "document_offsets": torch.tensor([0, stop - start], dtype=torch.int32),
                "longest_document": stop - start,
            }
            ids = given["input_ids"][:, start:stop]
            alone = trainer._teacher.backbone(ids, **one, use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(packed[start:stop], alone, rtol=2e-2, atol=2e-2)
    losses, _, _ = train(yaml, "device=sim:16MiB", "save_steps=null")
    assert len(losses) == 1


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2", "mixtral"])
def test_logits_of_the_teacher(tmp_path: Path, kind: str) -> None:
    """What a kind does with its logits (scales, caps) is found by running it."""
    folders.write_model(tmp_path / "teacher", kind)
    config = read_config(folders.write_run(tmp_path, teacher_model=str(tmp_path / "teacher")))
    teacher = load_teacher(config, zoo.VOCAB)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.bfloat16).eval()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        found = teacher.head.logits(teacher.backbone(input_ids=ids).last_hidden_state)
        assert torch.equal(found, whole(input_ids=ids).logits.to(found.dtype))


def test_the_plan_without_the_teacher_says_so(tmp_path: Path) -> None:
    found = plan_request(read_config(write_run(tmp_path)), "64MiB")
    assert any("teacher_model" in note for note in found.notes) and found.request.reserved_host_bytes > 0
