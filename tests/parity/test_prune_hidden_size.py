"""`prune.hidden_size`: runs of `outsize prune` against models of transformers that are put together by hand from the
teacher's and the library's files.
"""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import folders
import pruned
import pytest
import torch
import zoo
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, OlmoConfig, OlmoForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.config.read import read_config
from outsize.methods.bypass.train import LayerTraining
from outsize.run.prune import PruneOutcome, choose_run, prune_run
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import BEST, LATEST, Library
from outsize.run.prune_scores import Scoring, Variants
from outsize.run.prune_setup import PruneSetup, set_up
from outsize.run.prune_show import show_folder

COUNT, LAYERS = 16, 2
PRUNE: dict[str, Any] = {
    "hidden_size": COUNT, "importance": "independent", "linear": False, "copy": [], "keep_optimizer": False,
    "target": {"params": 0.45},
}  # fmt: skip


def write(folder: Path, kind: str = "qwen3", prune: dict[str, Any] | None = None, **keys: Any) -> Path:
    model = folder / "model"
    if kind == "qwen3" and not model.exists():
        tied_qwen3().save_pretrained(model)
        folders.write_tokenizer(model)
    given = {"val_set_size": 2, "bf16": False, "learning_rate": 3e-3, "save_steps": 1, **keys}
    return pruned.write(folder, kind, prune={**PRUNE, **(prune or {})}, **given)


def tied_qwen3() -> Any:
    """Norms of queries and keys, tied embeddings, and channels of different sizes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
        model.model.embed_tokens.weight.mul_(torch.linspace(0.2, 2, 32)[torch.randperm(32)])
    return model.to(torch.bfloat16)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PruneOutcome]:
    folder = tmp_path_factory.mktemp("hidden")
    outcome = pruned.run(write(folder, prune={"tokens": 1200}, weight_decay=0.0, max_grad_norm=1.0))
    return folder, outcome


def channels(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out/channels.json").read_text())


def entry(folder: Path, layer: int, name: str) -> dict[str, Tensor]:
    place = folder / "out/library" / f"{layer:03d}" / name
    return load_file(place / (BEST if (place / BEST).exists() else LATEST))


def cut(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A config and the weights of the teacher's class: by hand, from its files and channels.json."""
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    kept = channels(folder)
    keep = torch.tensor(kept["channels"])
    tensors = {}
    for name, value in teacher.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value = value[keep]
        elif value.dim() == 2:
            value = value[:, keep]
        elif name.removesuffix(".weight") in kept["scales"]:
            value = value[keep] * kept["scales"][name.removesuffix(".weight")]
        tensors[name] = value.clone()
    return type(teacher.config)(**{**teacher.config.to_dict(), "hidden_size": COUNT}), tensors


def whole(folder: Path, names: dict[int, list[str]]) -> Any:
    """The plain class with the library's variants. Narrower ones are filled up with zeros and repeated heads."""
    config, tensors = cut(folder)
    for layer, some in names.items():
        prefix = f"model.layers.{layer}."
        for name in some:
            if name == "attention-skip":
                tensors[f"{prefix}self_attn.o_proj.weight"].zero_()
            elif name == "ffn-skip":
                tensors[f"{prefix}mlp.down_proj.weight"].zero_()
            else:
                for rest, value in entry(folder, layer, name).items():
                    place = tensors[prefix + rest]
                    if name.startswith("ffn"):
                        place.zero_()
                        place[tuple(slice(size) for size in value.shape)] = value
                    else:
                        place.copy_(torch.cat([value] * (len(place) // len(value))))
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tensors)
    return model.eval()


IDS = torch.arange(3, 51).view(2, 24)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def copies() -> dict[int, list[str]]:
    return {layer: ["attention-copy", "ffn-copy"] for layer in range(LAYERS)}


def test_a_run_gives_a_smaller_model_that_loads(finished: tuple[Path, PruneOutcome]) -> None:
    folder, outcome = finished
    (model,) = outcome.models
    facts, kept = json.loads((model.folder / "prune.json").read_text()), channels(folder)
    assert facts["hidden_size"] == COUNT and facts["channels"] == kept["hash"] and kept["of"] == 32
    assert sorted(set(kept["channels"])) == kept["channels"] and len(kept["channels"]) == COUNT
    loaded = AutoModelForCausalLM.from_pretrained(model.folder, trust_remote_code=True, dtype=torch.float32).eval()
    assert loaded.config.hidden_size == COUNT and loaded.config.head_dim == 8
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    params = sum(param.numel() for param in loaded.parameters())
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert params == model.chosen.predicted["params"] <= 0.45 * model.chosen.teacher["params"]
    assert model.chosen.teacher["params"] == sum(param.numel() for param in teacher.parameters())
    names = {int(layer): some for layer, some in facts["variants"].items()}
    assert any(name != "attention-copy" and name != "ffn-copy" for some in names.values() for name in some)
    torch.testing.assert_close(logits(loaded), logits(whole(folder, names)), rtol=1e-5, atol=1e-5)


def test_a_uniform_model_is_of_the_plain_class(finished: tuple[Path, PruneOutcome]) -> None:
    folder, _ = finished
    config = read_config(folder / "run.yaml", ["prune.shape=uniform", "prune.target.params=0.35"])
    (model,) = choose_run(config, Console(file=io.StringIO()))
    loaded = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    assert type(loaded).__name__ == "Qwen3ForCausalLM" and not (model.folder / "modeling_pruned.py").exists()
    names = {layer: [one.name for one in some] for layer, some in model.chosen.variants.items()}
    torch.testing.assert_close(logits(loaded), logits(whole(folder, names)), rtol=1e-5, atol=1e-5)
    out = io.StringIO()
    show_folder(folder / "out", Console(file=out, width=140))
    assert f"hidden size 16 of 32; channels {channels(folder)['hash']}" in out.getvalue()


def test_limits_of_all_kinds_are_shares_of_the_teachers(finished: tuple[Path, PruneOutcome]) -> None:
    folder, _ = finished
    use = "context: 8, decoded: 2"
    limits = ", ".join(f"{{{limit}, {use}}}" for limit in ("memory: 0.6", "latency: {min: 0.01}"))
    by_memory, by_latency = choose_run(
        read_config(folder / "run.yaml", [f"prune.target=[{limits}]"]), Console(file=io.StringIO())
    )
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    weights = sum(param.nbytes for param in teacher.parameters())
    kv_bytes = 10 * LAYERS * 2 * 2 * 8 * 4
    assert by_memory.chosen.teacher["memory"] == weights + kv_bytes
    assert by_memory.chosen.predicted["memory"] <= 0.6 * (weights + kv_bytes)
    assert by_latency.chosen.predicted["latency"] > 0.01 * by_latency.chosen.teacher["latency"] > 0
    assert by_latency.chosen.variants.keys() == {0, 1}


def setup_of(folder: Path) -> PruneSetup:
    return set_up(read_config(folder / "run.yaml"))


@torch.no_grad()
def test_a_score_is_the_kl_beside_unpruned_variants(finished: tuple[Path, PruneOutcome]) -> None:
    folder, _ = finished
    setup = setup_of(folder)
    assert setup.validation is not None
    scores = json.loads((folder / "out/scores.json").read_text())["scores"]
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    steps = setup.num_steps
    for layer, kind, name in ((0, 1, "ffn-24"), (1, 0, "attention-kv1"), (0, 0, "attention-skip"), (1, 1, "ffn-copy")):
        names = copies()
        names[layer][kind] = name
        model, total, tokens = whole(folder, names), 0.0, 0
        for k in range(setup.num_validation):
            given = setup.validation(k)
            expected, own = (one(**given.arguments, use_cache=False).logits.log_softmax(-1) for one in (teacher, model))
            valid = torch.ones(own.shape[:2], dtype=torch.bool) if given.valid is None else given.valid
            total += float(kl_div(own[valid], expected[valid], reduction="sum", log_target=True))
            tokens += int(valid.sum())
        found = scores[f"{layer:03d}/{name} {0 if name.endswith('skip') else steps}"]["kl"]
        assert found == pytest.approx(total / tokens, rel=1e-3)
    base = {json.dumps(scores[f"{layer:03d}/ffn-copy {steps}"]) for layer in range(LAYERS)}
    assert len(base) == 1  # all are the same model


def test_training_recovers_what_the_lost_channels_did(finished: tuple[Path, PruneOutcome]) -> None:
    _, outcome = finished
    trained = [each for each in outcome.library if each.validation]
    assert len(trained) == 4 * LAYERS
    gains = [each.validation[0][1] - min(loss for _, loss in each.validation) for each in trained]
    assert min(gains) > 0
    assert sum(gains) > 0.15 * sum(each.validation[0][1] for each in trained)


@torch.no_grad()
def test_a_variant_learns_the_kept_channels_of_the_teachers_output(finished: tuple[Path, PruneOutcome]) -> None:
    """The loss before training, from hooks in the whole teacher and a sub-block that is cut by hand."""
    folder, outcome = finished
    setup = setup_of(folder)
    assert setup.validation is not None
    config, tensors = cut(folder)
    student = AutoModelForCausalLM.from_config(config).eval()
    student.load_state_dict(tensors)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    seen: dict[str, Any] = {}
    layer, own = teacher.model.layers[1], student.model.layers[1]
    layer.post_attention_layernorm.register_forward_hook(lambda module, args, output: seen.update(given=args[0]))
    layer.mlp.register_forward_hook(lambda module, args, output: seen.update(target=output))
    keep = torch.tensor(channels(folder)["channels"])
    losses = []
    for k in range(setup.num_validation):
        given = setup.validation(k)
        teacher(**given.arguments, use_cache=False)
        hidden, target = seen["given"][..., keep], seen["target"][..., keep]
        error = own.mlp(own.post_attention_layernorm(hidden)) - target
        valid = torch.ones(error.shape[:2], dtype=torch.bool) if given.valid is None else given.valid
        losses.append(float(error[valid].square().sum() / target[valid].square().sum()))
    (found,) = (each for each in outcome.library if (each.layer, each.variant) == (1, "ffn-copy"))
    assert found.validation[0] == (0, pytest.approx(sum(losses) / len(losses), rel=1e-4))


@pytest.mark.parametrize(
    ("owner", "function", "number"),
    [
        (StoredImportance, "_write", 4),
        (LayerTraining, "step", 18),
        pytest.param(Library, "finish", 3, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_continues(tmp_path: Path, owner: Any, function: str, number: int) -> None:
    small = {"tokens": 180, "target": [], "skip": [], "num_key_value_heads": [], "only_layers": [1], "keep": "both"}
    yaml = write(tmp_path, prune=small)
    assert pruned.killed_at(number, owner, function, lambda: pruned.run(yaml))
    assert pruned.run(yaml).is_finished
    clean = tmp_path / "clean"
    pruned.run(yaml, f"output_dir={clean}")
    pruned.require_equal(pruned.library(tmp_path / "out"), pruned.library(clean))
    assert channels(tmp_path) == json.loads((clean / "channels.json").read_text())
    names = {int(path.name): sorted(each.name for each in path.iterdir()) for path in (clean / "library").iterdir()}
    assert names == {0: ["attention-copy", "ffn-copy"], 1: ["attention-copy", "ffn-24", "ffn-copy"]}


def test_a_folder_has_one_hidden_size(finished: tuple[Path, PruneOutcome], tmp_path: Path) -> None:
    folder, _ = finished
    with pytest.raises(ConfigError, match=r"prune.hidden_size was 16 and is 20. Set it back"):
        pruned.run(folder / "run.yaml", "prune.hidden_size=20")
    with pytest.raises(ConfigError, match=r"prune.hidden_size was 16 and is None"):
        pruned.run(folder / "run.yaml", "prune.hidden_size=null")
    shutil.copytree(folder / "out", tmp_path / "out")
    facts = channels(folder)
    facts["channels"][0] = next(number for number in range(32) if number not in facts["channels"])
    facts["channels"].sort()
    (tmp_path / "out/channels.json").write_text(json.dumps(facts))
    with pytest.raises(BadFile, match=r"channels.json is damaged: its channels do not have its hash"):
        pruned.run(folder / "run.yaml", f"output_dir={tmp_path / 'out'}", "prune.target.params=0.5")


def test_a_class_that_scales_its_embedding_by_the_hidden_size(tmp_path: Path) -> None:
    """Gemma 3: the embedding makes up for it, and as that is also the head, the norm in front of the head takes it back.
    Its norms multiply with 1 + weight, and also follow attention and feed-forward.
    """
    few = {"intermediate_size": [], "num_key_value_heads": [], "skip": [], "tokens": 90, "target": {"params": 0.9}}
    (model,) = pruned.run(write(tmp_path, "gemma3", prune=few)).models
    names = {
        int(layer): some for layer, some in json.loads((model.folder / "prune.json").read_text())["variants"].items()
    }
    assert names == {layer: ["attention-copy", "ffn-copy"] for layer in range(3)}
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    kept, expected = channels(tmp_path), {}
    keep = torch.tensor(kept["channels"])
    for name, value in teacher.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value = value[keep]
        elif value.dim() == 2:
            value = value[:, keep]
        elif (scale := kept["scales"].get(name.removesuffix(".weight"))) is not None:
            value = (1 + value[keep]) * scale - 1
        expected[name] = value.clone()
    for layer, some in names.items():
        for each in some:
            expected |= {f"model.layers.{layer}.{rest}": value for rest, value in entry(tmp_path, layer, each).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected[name] *= 2**0.5
    expected["model.norm.weight"] = (1 + expected["model.norm.weight"]) / 2**0.5 - 1
    loaded = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.state_dict().keys() == expected.keys() and len(kept["scales"]) == 13
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def test_a_folder_with_linear_attention_is_the_model_that_was_evaluated(tmp_path: Path) -> None:
    few = {"intermediate_size": [], "num_key_value_heads": [], "skip": [], "linear": True, "tokens": 90}
    (model,) = pruned.run(write(tmp_path, "llama", prune={**few, "target": {"params": 0.36}})).models
    names = {one.name for some in model.chosen.variants.values() for one in some}
    assert names == {"attention-linear", "ffn-copy"}
    setup = set_up(read_config(tmp_path / "run.yaml"))
    importance = StoredImportance(setup, tmp_path / "out")
    importance.rank()
    variants = Variants(setup.of_reduced(), Library(tmp_path / "out"), importance)
    assert Scoring(variants, setup.prune.score_tokens, None).of_folder(model.folder) == model.trained
    assert 0 < model.trained.cosine < 1 and model.trained != model.pruned


def test_packed_rows_whose_last_document_has_one_token(tmp_path: Path) -> None:
    prune = {"target": [], "skip": [], "tokens": 90, "only_layers": [0]}
    setup_of_packed = set_up(read_config(yaml := write(tmp_path, "llama", prune=prune, sample_packing=True)))
    assert setup_of_packed.widest["position_ids"][0, -1] == 0
    outcome = pruned.run(yaml)
    assert [each.variant for each in outcome.library[:4]] == ["ffn-24", "attention-kv1", "attention-copy", "ffn-copy"]
    assert all(each.validation[-1][1] < 2 for each in outcome.library)


def olmo() -> Any:
    """Norms without weights, which nothing could rescale."""
    torch.manual_seed(0)
    return OlmoForCausalLM(
        OlmoConfig(
            vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "named"), [("gpt2", "c_attn"), ("olmo", "self_attn: with fewer channels, its class")])
def test_models_that_depend_on_the_hidden_size_in_another_way_are_refused(
    tmp_path: Path, kind: str, named: str
) -> None:
    if kind == "olmo":
        olmo().save_pretrained(tmp_path / "model")
        folders.write_tokenizer(tmp_path / "model")
    with pytest.raises(ModelUnsupported, match=named):
        pruned.run(write(tmp_path, kind, {"num_key_value_heads": []}))


def test_rounds_and_groups_give_the_same_bits_within_the_planned_memory(tmp_path: Path) -> None:
    prune = {"tokens": 270, "importance_tokens": 90, "target": [], "skip": [], "keep_optimizer": True}
    yaml = write(tmp_path, prune=prune, save_steps=None)
    made = pruned.run(yaml).plan
    expected = pruned.library(tmp_path / "out")
    rounds = f"host_memory={made.host_bytes - made.hidden_bytes // 2}"
    outcome = pruned.run(yaml, rounds, f"output_dir={tmp_path / 'rounds'}")
    assert len(outcome.plan.rounds) > 1
    pruned.require_equal(pruned.library(tmp_path / "rounds"), expected)
    least = pruned.least_gpu_memory(yaml, "device=sim:64MiB", "gpu_memory=1KiB")
    limits = ["device=sim:64MiB", f"gpu_memory={least}B", f"output_dir={tmp_path / 'groups'}"]
    outcome = pruned.run(yaml, *limits)
    assert outcome.plan.num_groups > 1 and outcome.gpu_peak_bytes <= outcome.plan.gpu_bytes
    pruned.require_equal(pruned.library(tmp_path / "groups"), expected)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("prune.importance=truncate", "needs measured importance"),
        ("prune.form=padded", "has the teacher's hidden size"),
        ("prune.costs=x.json", "no place for seconds of the teacher"),
        ("prune.hidden_size=32", "not below the teacher's 32"),
    ],
)
def test_settings_that_do_not_go_together(finished: tuple[Path, PruneOutcome], override: str, named: str) -> None:
    folder, _ = finished
    with pytest.raises(ConfigError, match=named):
        pruned.run(folder / "run.yaml", override, f"output_dir={folder / 'other'}")


def test_blocks_with_local_scores_and_distillation(tmp_path: Path) -> None:
    """A whole run with blocks, local scores and end-to-end training with the teacher."""
    yaml = write(
        tmp_path,
        "llama",
        prune={
            "learn": ["block"], "score": "local", "num_key_value_heads": [], "skip": [], "tokens": 180,
            "distill": {"tokens": 200},
        },
    )  # fmt: skip
    outcome = prune_run(read_config(yaml), Console(file=io.StringIO()))
    (model,) = outcome.models
    assert {each.variant for each in outcome.library} == {"block-24", "block-copy-copy"}
    assert model.final is not None and 0 < model.final.kl < 1 and model.final.cosine > 0
    loaded = AutoModelForCausalLM.from_pretrained(f"{model.folder}-distilled", trust_remote_code=True)
    assert loaded.config.hidden_size == COUNT
