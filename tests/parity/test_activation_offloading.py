"""The values of `activation_offloading`, trap D46: each does what it says, by bytes on host and disk, with the weights of
training without it. The two lines of docs/long-context.md.
"""

import logging
import os
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import trainers
import zoo
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer

import outsize
from outsize.activation.layer_offload import is_offloaded
from outsize.base.errors import ConfigError, EngineMisuse
from outsize.config.read import parse_config, read_config
from outsize.integrations.offloading import OffloadMixin, OffloadTrainer
from outsize.run.assemble import assemble
from outsize.setup.activation_offload import enable_offload
from outsize.transfer.file_arena import FileArena

ROWS, TOKENS, LAYERS = 2, 16, 4
INPUT_BYTES = ROWS * TOKENS * zoo.HIDDEN * 4
EVERY = pytest.mark.parametrize("name", ["true", "legacy", "disk", "hidden_states"])
BASES = pytest.mark.parametrize("base", ["full", "lora"])


def model_of(base: str) -> nn.Module:
    model = zoo.make("llama")
    if base == "full":
        return model
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=4, lora_dropout=0.1))


def trained(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters() if param.requires_grad]


def run(trainer: Trainer) -> list[Tensor]:
    torch.manual_seed(5)
    trainer.train()
    return trained(trainer.model)


def recomputations(model: nn.Module) -> list[int]:
    """Counts the calls of the first layer's MLP."""
    calls: list[int] = []
    mlp = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@EVERY
@BASES
def test_each_value_moves_its_bytes_in_a_plain_trainer_d46(name: Any, base: str, tmp_path: Path) -> None:
    """Trap D46. Four layers. Of those whose inputs are sent, the last three stay on the device; of those that send all
    that they save, the last (none with `legacy`).
    """
    given: dict[str, Any] = dict(args=trainers.arguments(tmp_path, max_steps=2), train_dataset=trainers.rows())
    expected = run(Trainer(model=model_of(base), **given))
    model = model_of(base)
    calls = recomputations(model)
    if name == "disk":
        given["offload_folder"] = tmp_path
    trainer = OffloadTrainer(model=model, activation_offloading=True if name == "true" else name, **given)
    assert all(torch.equal(a, b) for a, b in zip(run(trainer), expected, strict=True))
    offload = trainer.offload
    recomputes = name == "hidden_states" or (base == "full" and name != "legacy")
    assert len(calls) == 2 * (2 if recomputes else 1)
    sent = 4 if name == "legacy" else 1 if recomputes else 3
    assert offload is not None and offload.num_sent == 2 * sent
    if recomputes:
        assert offload.arena_bytes == INPUT_BYTES
    else:
        assert offload.arena_bytes > 5 * sent * INPUT_BYTES, "all that a layer saves"
    assert not any(is_offloaded(module) for module in model.modules())
    assert not list(tmp_path.glob("outsize-*"))


@BASES
def test_disk_is_on_disk_and_the_others_are_not_d46(base: str, tmp_path: Path) -> None:
    batch = zoo.batch("llama", size=ROWS, tokens=TOKENS)
    for name in ("true", "disk"):
        model = model_of(base)
        offload = enable_offload(model, name, folder=tmp_path)
        loss = model(**batch).loss
        (queue,) = offload._queues.values()
        in_file = os.fstat(queue.arena._fd).st_blocks * 512 if isinstance(queue.arena, FileArena) else 0
        assert (in_file >= offload.used_bytes > 0) == (name == "disk")
        loss.backward()
        offload.disable()


def test_trainers_of_trl(tmp_path: Path) -> None:
    """They turn gradient checkpointing on by default."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class Offloading(OffloadMixin, trl.SFTTrainer):
        pass

    tokenizer = folders.write_tokenizer(tmp_path / "model")
    data = datasets.Dataset.from_dict({"text": folders.sentences(8)})

    def weights(kind: Any, **given: Any) -> list[Tensor]:
        args = trl.SFTConfig(
            str(tmp_path), max_steps=2, use_cpu=True, bf16=False, report_to=[], max_length=16, learning_rate=1e-2
        )
        trainer = kind(zoo.make("llama"), args, train_dataset=data, processing_class=tokenizer, **given)
        trainer.train()
        assert not given or trainer.offload.num_sent == 2
        return trained(trainer.model)

    found = weights(Offloading, activation_offloading="hidden_states")
    assert all(torch.equal(a, b) for a, b in zip(found, weights(trl.SFTTrainer), strict=True))


def test_false_offloads_nothing_and_auto_is_of_plans(tmp_path: Path) -> None:
    given: dict[str, Any] = dict(model=model_of("full"), args=trainers.arguments(tmp_path))
    trainer = OffloadTrainer(activation_offloading=False, train_dataset=trainers.rows(), **given)
    run(trainer)
    assert trainer.offload is None
    for wrong, said in (
        ({"activation_offloading": "auto"}, "The plan of OutsizeTrainer decides by itself; here there is none"),
        ({"activation_offloading": "some"}, "is unknown here"),
        ({"save_attention": True, "activation_offloading": True}, "save_attention is for 'hidden_states'"),
        ({"offload_folder": tmp_path, "host_memory": "1GiB"}, "offload_folder is for 'disk'"),
        ({"activation_offloading": "disk", "host_memory": "1GiB"}, "host_memory is for the values"),
        ({"model_init": lambda: None}, "pass model"),
    ):
        with pytest.raises(ConfigError, match=said):
            OffloadTrainer(**{**given, **wrong})
    given["args"].activation_offloading = True  # as in TRL's configs
    with pytest.raises(ConfigError, match=r"TRL's own offload"):
        OffloadTrainer(**given)


def test_the_two_lines_of_the_docs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With gradient checkpointing on, which is replaced, with a message."""
    page = (Path(__file__).parents[2] / "docs" / "long-context.md").read_text()
    assert "with outsize.hidden_states_offload(model):\n    trainer.train()\n" in page
    args: Any = trainers.arguments(tmp_path, max_steps=2, gradient_checkpointing=True)
    expected = run(Trainer(model=model_of("full"), args=args, train_dataset=trainers.rows()))
    model = model_of("full")
    trainer = Trainer(model=model, args=args, train_dataset=trainers.rows())
    torch.manual_seed(5)
    with outsize.hidden_states_offload(model) as offload:
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(trained(model), expected, strict=True))
    assert offload.num_sent == 2
    assert "gradient checkpointing is turned off" in caplog.text
    assert model.is_gradient_checkpointing, "as the Trainer has left it"


def test_a_prepared_model_is_refused_and_an_offloaded_one_is_not_prepared() -> None:
    model, batch = zoo.make("llama"), zoo.batch("llama")
    with outsize.hidden_states_offload(model), pytest.raises(EngineMisuse, match="disable"):
        outsize.prepare(model, batch, device="cpu")
    engine = outsize.prepare(model, batch, device="cpu")
    with pytest.raises(EngineMisuse, match="prepared model"):
        outsize.enable_hidden_states_offload(model)
    engine.detach()


# --- runs with a plan


def strategies(folder: Path, **keys: Any) -> tuple[set[str], int]:
    """The strategies of a run's layers, and its bytes of activations on the host."""
    yaml = folders.write_run(folder, gradient_accumulation_steps=1, **keys)
    trainer = assemble(read_config(yaml)).trainer
    planned = trainer.preview()
    trainer.stop_engine()
    plan, graph = planned.plan, planned.graph
    layers = {
        plan.decision.strategies[call] for call, block in enumerate(graph.calls) if graph.blocks[block].kind == "layer"
    }
    return layers, sum(work.sent_bytes for work in plan.work)


LORA = {"adapter": "lora", "lora_target_linear": True}


@pytest.mark.parametrize(
    ("name", "full", "lora"),
    [
        (True, {"offload"}, {"swap"}),
        ("hidden_states", {"offload"}, {"offload"}),
        ("legacy", {"swap"}, {"swap"}),
        (False, {"keep"}, {"keep"}),
        ("auto", {"keep"}, {"keep"}),
    ],
)
@BASES
def test_each_value_moves_its_bytes_in_a_run_d46(
    name: Any, full: set[str], lora: set[str], base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trap D46. On a device with memory for everything, where `auto` keeps."""
    with caplog.at_level(logging.WARNING):
        found, sent = strategies(
            tmp_path, device="sim:1GiB", activation_offloading=name, **(LORA if base == "lora" else {})
        )
    assert found == (full if base == "full" else lora)
    assert (sent > 0) == bool(found - {"keep"})
    assert ("With true, what layers save" in caplog.text) == (name == "hidden_states" and base == "lora")
    assert ("In a plan its copies run beside compute" in caplog.text) == (name == "legacy")


def test_contradictions_of_a_run_are_reported() -> None:
    given: dict[str, Any] = {"base_model": "m", "datasets": ["d"], "output_dir": "o"}
    for keys, said in (
        ({"activation_offloading": "disk"}, "disk is for training without a plan"),
        ({"activation_offloading": True, "plan": {"n_swap": 1}}, "true conflicts with plan"),
        ({"activation_offloading": False, "plan": "plan.json"}, "false conflicts with plan"),
        ({"activation_offloading": "some"}, "activation_offloading"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_config({**given, **keys}, "run.yaml")
    assert parse_config({**given, "activation_offloading": True, "plan": {"n_persist": 1}}, "run.yaml").pins == {
        "n_persist": 1
    }
