"""Folders of pruned models, from library to clean process, for each kind of `per_layer`: against the plain class with
zeros and repeats, which is made here from the files of teacher and library alone.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import folders
import pruned
import pruned_models
import pytest
import torch
import yaml as yaml_module
import zoo
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.config.read import read_config
from outsize.model.build import build_model
from outsize.model.weights import FileWeights
from outsize.run.prune_assemble import Assembly
from outsize.run.prune_choice import places
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import LATEST, Library
from outsize.run.prune_scores import Pick, Scoring, Variants
from outsize.run.prune_setup import PruneSetup, set_up

DEFAULT = ("gemma3_text",)
KINDS = [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.full) for kind in pruned_models.KINDS]
CHOSEN = {0: ("attention-skip", "ffn-24"), 1: ("attention-kv1",), 2: ("ffn-skip",), 3: ("attention-skip", "ffn-skip")}
IN_A_CLEAN_PROCESS = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
folder = sys.argv[1]
try:
    transformers.AutoModelForCausalLM.from_pretrained(folder)
except Exception as error:
    assert "AmbiguousGlobalPerLayerAttribute" in type(error).__name__, error
else:
    sys.exit("it loads without trust_remote_code")
load = transformers.AutoModelForCausalLM.from_pretrained
x = torch.arange(3, 27).view(2, 12)
with torch.no_grad():
    for attention in ("sdpa", "eager"):
        model = load(folder, trust_remote_code=True, dtype=torch.float64, attn_implementation=attention).eval()
        used = {m.config._attn_implementation for m in model.modules() if hasattr(m, "k_proj")}
        assert used == {attention}, used
        whole = model(input_ids=x, use_cache=False).logits
        torch.save(whole, f"{folder}/{attention}.pt")
        for length in range(1, 12):
            changed = x.clone()
            changed[:, length:] = 50
            torch.testing.assert_close(
                model(input_ids=changed, use_cache=False).logits[:, :length], whole[:, :length], rtol=1e-12, atol=1e-12
            )
        past, steps = None, []
        for place in range(12):
            out = model(input_ids=x[:, place : place + 1], past_key_values=past, use_cache=True)
            past = out.past_key_values
            steps.append(out.logits)
            assert past.get_seq_length() == place + 1
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-10, atol=1e-10)
        made = model.generate(input_ids=x, max_new_tokens=6, do_sample=False, eos_token_id=None)
        grown = x
        for _ in range(6):
            grown = torch.cat([grown, model(input_ids=grown, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(made, grown)
assert transformers.AutoTokenizer.from_pretrained(folder)("the cat").input_ids
assert not any(name.split(".")[0] == "outsize" for name in sys.modules)
"""


def write(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    config = pruned_models.teacher_config(kind)
    config.vocab_size = zoo.VOCAB
    model = AutoModelForCausalLM.from_config(config)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(folder / "model")
    folders.write_tokenizer(folder / "model")
    variants = {"intermediate_size": [24], "num_key_value_heads": [1], "skip": ["attention", "ffn"]}
    others = {"linear": False, "copy": [], "tokens": 90, "keep": "latest"}
    return pruned.write(folder, kind, prune={**variants, **others}, val_set_size=2, bf16=False)


def chosen_of(setup: PruneSetup) -> Any:
    return {layer: tuple(one for one in setup.variants[layer] if one.name in names) for layer, names in CHOSEN.items()}


def plain(folder: Path) -> Any:
    """The teacher's class in fp64. What a variant lacks is zero, and heads that it merged are repeated."""
    teacher = load_file(folder / "model" / "model.safetensors")
    for layer, names in CHOSEN.items():
        prefix = f"model.layers.{layer}."
        for name in names:
            if name.endswith("-skip"):
                zero = "self_attn.o_proj.weight" if name.startswith("attention") else "mlp.down_proj.weight"
                teacher[prefix + zero] = torch.zeros_like(teacher[prefix + zero])
                continue
            for key, tensor in load_file(folder / "out/library" / f"{layer:03d}" / name / LATEST).items():
                whole = teacher[prefix + key]
                if tensor.shape == whole.shape:
                    teacher[prefix + key] = tensor
                elif "mlp" in key:
                    wide = torch.zeros_like(whole)
                    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
                    teacher[prefix + key] = wide
                else:
                    assert "k_proj" in key or "v_proj" in key
                    teacher[prefix + key] = torch.cat([tensor] * (len(whole) // len(tensor)))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
    missing, unexpected = model.load_state_dict({name: value.double() for name, value in teacher.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in torch.arange(3, 27).view(2, 12)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_what_was_chosen(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write(tmp_path, kind)
    pruned.run(yaml)
    read: Counter[str] = Counter()
    plainly = FileWeights.read_into

    def counted(self: FileWeights, name: str, tensor: torch.Tensor) -> None:
        read[name] += 1
        plainly(self, name, tensor)

    monkeypatch.setattr(FileWeights, "read_into", counted)
    setup = set_up(read_config(yaml))
    library, out = Library(tmp_path / "out"), tmp_path / "made"
    variants = Variants(setup, library, StoredImportance(setup, tmp_path / "out"))
    # All replacements, raw and trained, are scored in one pass: every weight of a layer is read once.
    picks = [Pick(layer, one, raw) for layer, each in setup.variants.items() for one in each for raw in (False, True)]
    read.clear()
    _, found = Scoring(variants, 10**6, None).of({pick.name: (pick,) for pick in picks}, lambda done, total: None)
    assert len(found) == len(picks) and max(read.values()) == 1
    layers = [name for name, _ in setup.stack.model.named_parameters() if name.startswith("model.layers.")]
    assert all(read[name] == 1 for name in layers)
    chosen = chosen_of(setup)
    assert {layer: len(each) for layer, each in chosen.items()} == {layer: len(each) for layer, each in CHOSEN.items()}
    assert Assembly(variants, chosen, places(setup)).write(out, None, {}) == "per_layer"
    with pytest.raises(Exception, match="exists"):
        Assembly(variants, chosen, places(setup)).write(out, None, {})
    setup.teacher.close()
    assert model_is_tied(setup) and "lm_head.weight" not in load_file(out / "model.safetensors")  # D21
    model = plain(tmp_path)
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    in_a_clean_process(tmp_path, out)
    for attention in ("sdpa", "eager"):
        logits = torch.load(out / f"{attention}.pt")
        tolerance = 1e-12 if attention == "sdpa" else 1e-5  # eager: softmax in fp32
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    built = build_model(str(out), dtype=torch.float64)
    assert "transformers_modules" not in " ".join(type(m).__module__ for m in built.model.modules())
    accepted_by_others(tmp_path, out, kind)


def model_is_tied(setup: PruneSetup) -> bool:
    model: Any = setup.stack.model
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def in_a_clean_process(tmp_path: Path, folder: Path) -> None:
    """Where there is no teacher, no library and no outsize."""
    script, hidden = tmp_path / "load.py", tmp_path / "hidden"
    script.write_text(IN_A_CLEAN_PROCESS)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    hidden.mkdir()
    for name in ("model", "out"):
        (tmp_path / name).rename(hidden / name)
    subprocess.run([sys.executable, str(script), str(folder)], check=True, cwd=hidden, env=environment)
    for name in ("model", "out"):
        (hidden / name).rename(tmp_path / name)


def accepted_by_others(tmp_path: Path, folder: Path, kind: str) -> None:
    """Trainer, PEFT and `outsize train`, whose exports load again."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    settings = TrainingArguments(str(tmp_path / "peft"), max_steps=2, report_to=[], use_cpu=True, learning_rate=0.05)
    trainer: Any = Trainer(model, settings, train_dataset=rows())  # type: ignore[arg-type]
    before = trainer.evaluate(rows())["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows())["eval_loss"] < before
    run = tmp_path / "trained"
    run.mkdir()
    shutil.copytree(folder, run / "model")
    for attention in ("sdpa.pt", "eager.pt"):
        (run / "model" / attention).unlink()
    yaml = folders.write_run(run, max_steps=2, bf16=False)
    settings_of_run: Mapping[str, Any] = yaml_module.safe_load(yaml.read_text())
    assert settings_of_run["base_model"] == str(run / "model")
    from rich.console import Console

    from outsize.run.train import train_run

    result = train_run(read_config(yaml, ["device=sim:16MiB"]), Console(quiet=True)).result
    assert result is not None
    again = AutoModelForCausalLM.from_pretrained(result, trust_remote_code=True)
    assert type(again).__name__.startswith("Pruned")
    one, other = (json.loads((place / "config.json").read_text()) for place in (folder, result))
    assert one["per_layer_config"] == other["per_layer_config"]


@pytest.mark.parametrize(
    "kind", [kind if kind == "gemma3_text" else pytest.param(kind, marks=pytest.mark.full) for kind in
             ("gemma3_text", "llama", "gpt2", "mixtral")]
)  # fmt: skip
def test_predicted_parameters_are_those_of_the_folder(tmp_path: Path, kind: str) -> None:
    """Whatever is in a layer beside its parts, in every form; and the advice for an impossible target can be taken."""
    if kind in pruned_models.KINDS:
        yaml = write(tmp_path, kind)
    else:
        given = {"num_key_value_heads": []} if kind == "gpt2" else {}
        prune = {"skip": ["attention", "ffn"], "linear": False, "copy": [], "tokens": 90, **given}
        yaml = pruned.write(tmp_path, kind, prune=prune, val_set_size=2, bf16=False)
    pruned.run(yaml)
    if kind == "gpt2":
        with pytest.raises(ModelUnsupported, match="as a whole one, with random weights in what was removed"):
            pruned.run(yaml, "prune.target={params: 0.9}", "prune.intermediate_size=null")
    for form in ([], ["prune.shape=uniform"])[kind == "gpt2" :]:
        (made,) = pruned.run(yaml, "prune.target={params: 0.75}", *form).models
        model = AutoModelForCausalLM.from_pretrained(made.folder, trust_remote_code=True)
        assert model.num_parameters() == made.chosen.predicted["params"]
        teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert teacher.num_parameters() == made.chosen.teacher["params"]
        with pytest.raises(ConfigError, match="change one to: params") as caught:
            pruned.run(yaml, "prune.target={params: 1000}", *form)
        if kind == "gpt2":
            continue  # without any layer it is of no form
        least = int(caught.value.nearest["params"])  # type: ignore[attr-defined]
        (smallest,) = pruned.run(yaml, f"prune.target={{params: {least}}}", *form).models
        assert smallest.chosen.predicted["params"] == least
        with pytest.raises(ConfigError, match="change one to: params"):
            pruned.run(yaml, f"prune.target={{params: {least - 1}}}", *form)
