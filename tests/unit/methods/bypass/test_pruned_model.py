"""Models whose layers differ: against the plain class, as folders in a clean process, and under training."""

import io
import json
import os
import subprocess
import sys

import cells
import folders
import pytest
import torch
from pruned_models import CHANGES, KINDS, pair, parts, teacher_config
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import outsize
from outsize.base.errors import ModelUnsupported
from outsize.config.read import read_config
from outsize.methods.bypass.pruned_config import LayerChange, pruned_config, require_refused
from outsize.model.build import build_model
from outsize.model.pruned import MODELING_FILE
from outsize.run.train import train_run

WITHOUT_LINEAR = {**CHANGES, 3: LayerChange({"intermediate_size": 48})}
TOKENS = torch.arange(3, 27).view(2, 12)

IN_A_CLEAN_PROCESS = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
x = torch.arange(3, 27).view(2, 12)
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64).eval()
    with torch.no_grad():
        torch.save(model(input_ids=x, use_cache=False).logits, folder + "/logits.pt")
        made = model.generate(input_ids=x, max_new_tokens=8, do_sample=False, eos_token_id=None)
        grown = x
        for _ in range(8):
            grown = torch.cat([grown, model(input_ids=grown, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(made, grown), folder
    for kind in (transformers.AutoModelForCausalLM, getattr(transformers, model.config.pruned_layers["parent"])):
        try:
            kind.from_pretrained(folder)
        except Exception as error:
            assert "AmbiguousGlobalPerLayerAttribute" in type(error).__name__, (folder, error)
        else:
            sys.exit(folder + ": loaded as a plain model")
assert not any(name.split(".")[0] == "outsize" for name in sys.modules)
"""


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_equals_plain_class_with_zeroed_and_repeated_weights(kind):
    models = pair(kind, changes=WITHOUT_LINEAR)
    one, other = (m(input_ids=TOKENS, use_cache=False).logits for m in (models.pruned, models.plain))
    assert one.std() > 0.1
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_linear_attention_equals_attention_to_one_token():
    models = pair("llama")
    one, other = (m(input_ids=TOKENS[:, :1], use_cache=False).logits for m in (models.pruned, models.plain))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_causal_and_cached_decoding_equals_uncached(kind):
    model = pair(kind).pruned
    whole = model(input_ids=TOKENS, use_cache=False).logits
    changed = TOKENS.clone()
    changed[:, 8:] = 50
    assert torch.equal(model(input_ids=changed, use_cache=False).logits[:, :8], whole[:, :8])
    assert not torch.equal(model(input_ids=changed, use_cache=False).logits[:, 8:], whole[:, 8:])
    step = model(input_ids=TOKENS[:, :8], use_cache=True)
    logits, past = [step.logits], step.past_key_values
    for index in range(8, 12):
        step = model(input_ids=TOKENS[:, index : index + 1], past_key_values=past, use_cache=True)
        logits.append(step.logits)
        assert past.get_seq_length() == index + 1
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_attention_implementation_reaches_every_layer():
    model = pair("llama").pruned
    seen = {}
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        seen[kind] = model(input_ids=TOKENS, use_cache=False).logits
        attentions = [m for m in model.modules() if hasattr(m, "k_proj")]
        assert attentions and {m.config._attn_implementation for m in attentions} == {kind}
    torch.testing.assert_close(seen["eager"], seen["sdpa"], rtol=1e-5, atol=1e-5)  # eager: softmax in fp32
    model.model.set_attn_implementation("eager")
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "k_proj")} == {"eager"}


def test_folder_loads_in_a_clean_process_and_in_outsize(tmp_path):
    """D22: only the folder; without trust_remote_code an error, never a whole model with random weights."""
    only = {
        "skip-attention": {0: LayerChange(skip=frozenset({"attention"}))},
        "skip-mlp": {1: LayerChange(skip=frozenset({"mlp"}))},
        "linear": {2: LayerChange(linear=frozenset({"attention"}))},
    }
    cases = {kind: (kind, CHANGES) for kind in KINDS} | {name: ("llama", changes) for name, changes in only.items()}
    logits = {}
    for name, (kind, changes) in cases.items():
        model = pair(kind, changes=changes).pruned
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            logits[name] = model(input_ids=TOKENS, use_cache=False).logits
    script = tmp_path / "load.py"
    script.write_text(IN_A_CLEAN_PROCESS)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    folders = [str(tmp_path / name) for name in cases]
    subprocess.run([sys.executable, str(script), *folders], check=True, cwd=tmp_path, env=environment)
    for name in cases:
        assert torch.equal(torch.load(tmp_path / name / "logits.pt"), logits[name]), name
        built = build_model(str(tmp_path / name), dtype=torch.float64)
        assert type(built.model).__module__ == "outsize.model.pruned"
        assert "transformers_modules" not in " ".join(type(m).__module__ for m in built.model.modules())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once(tmp_path, tied):
    """D21: and the folder saved from a loaded one is the same."""
    from safetensors import safe_open

    model = pair("llama", torch.float32, tied=tied).pruned
    model.save_pretrained(tmp_path / "one")
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", trust_remote_code=True)
    loaded.save_pretrained(tmp_path / "two")
    for name in (MODELING_FILE, "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert one.pop("auto_map") and two.pop("auto_map") and one == two


def test_names_of_code_files_cannot_leave_the_folder(tmp_path):
    pair("llama", torch.float32).pruned.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == [MODELING_FILE]


def test_a_change_that_the_plain_class_would_ignore_is_refused():
    config = teacher_config("llama")
    with pytest.raises(ModelUnsupported, match="Use form: padded"):
        require_refused(pruned_config(config, LlamaForCausalLM, "model.layers", parts("llama"), {0: LayerChange()}))


def test_modeling_file_is_short(tmp_path):
    pair("llama", torch.float32).pruned.save_pretrained(tmp_path)
    assert len((tmp_path / MODELING_FILE).read_text().splitlines()) < 130
    assert "outsize" not in {
        line.split()[1].split(".")[0]
        for line in (tmp_path / MODELING_FILE).read_text().splitlines()
        if line.startswith(("import", "from"))
    }


def batches():
    rows = torch.randint(3, 99, (3, 2, 12), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": ids, "labels": ids} for ids in rows]


@pytest.mark.parametrize(
    "device, placement",
    [
        ("cpu", {"strategy": "recompute"}),
        ("sim:1MiB", {"weights": "host", "optimizer": "host", "strategy": "offload"}),
        ("sim:1MiB", {"weights": "host", "optimizer": "host", "strategy": "keep"}),
    ],
)
def test_training_under_the_engine_equals_plain_training(device, placement):
    """Layers without any parameter included."""
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1)
    changes = {**CHANGES, 4: LayerChange(skip=frozenset({"attention", "mlp"}))}
    expected = cells.plain(pair("llama", torch.float32, changes).pruned.train(), batches(), spec=spec, steps=3)
    model = pair("llama", torch.float32, changes).pruned.train()
    assert not list(model.model.layers[4].parameters())
    engine = cells.prepare_by_hand(model, batches()[0], spec=spec, device=device, **placement)
    with cells.closing(engine):
        found = cells.train(model, engine.optimizer, batches(), steps=3, accumulate=1, engine=engine)
    cells.assert_same(found, expected)


def test_checkpoint_of_the_engine_loads_in_transformers(tmp_path):
    model = pair("llama", torch.float32).pruned.train()
    engine = outsize.prepare(model, batches()[0], optimizer=outsize.AdamW(lr=1e-2), device="sim:64MiB")
    with cells.closing(engine):
        cells.train(model, engine.optimizer, batches(), steps=2, accumulate=1, engine=engine)
        engine.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())


def test_peft_and_trainer(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    pair("llama", torch.float32).pruned.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 27).view(2, 12)]
    settings = TrainingArguments(str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, learning_rate=0.1)
    trainer = Trainer(model, settings, train_dataset=rows)
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows)["eval_loss"] < before


def test_outsize_train_and_what_it_prints(tmp_path):
    yaml = folders.write_run(tmp_path, max_steps=2)
    pair("llama", torch.float32).pruned.save_pretrained(tmp_path / "model")
    console = Console(record=True, width=400, file=io.StringIO())
    train_run(read_config(yaml, ["device=sim:4MiB"]), console)
    code = console.export_text().split("\nload")[1].split("\nchat")[0]
    names = {}
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    assert type(names["model"]).__name__ == "PrunedLlamaForCausalLM"
    first = build_model(str(tmp_path / "model"), dtype=torch.float32).weights
    assert first is not None
    assert not torch.equal(
        names["model"].model.layers[1].mlp.up_proj.weight,
        pair("llama", torch.float32).pruned.model.layers[1].mlp.up_proj.weight,
    )
