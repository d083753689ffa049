"""Building a model from its folder: the one that from_pretrained gives, without holding its weights twice; or a
reason.
"""

import json
import os
from pathlib import Path
from typing import Any

import cells
import huggingface_hub
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ViTConfig,
)

import outsize
from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.checkpoint.model_files import SINGLE
from outsize.model.build import build_model, load_config, trainable_class
from outsize.model.weights import is_unmaterialized

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)
STREAMED = ["llama", "llama-untied", "qwen3", "gemma2", "gpt2", "t5", "one-block"]
"""Kinds that are stored as they are run. (BERT is a classifier here: build_model makes it from its architecture's
name.)
"""


def saved(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **how: Any) -> nn.Module:
    model = zoo.make(kind, dtype, seed=3)
    model.save_pretrained(folder, **how)
    return model


def trained(model: nn.Module, kind: str, weights: Any = None, **how: Any) -> cells.Outcome:
    data = cells.batches(kind, 3)
    engine = outsize.prepare(
        model, data[0], optimizer=SPEC, device="sim:64MiB", chunk_bytes="8KiB", weights=weights, **how
    )
    with cells.closing(engine):
        return cells.train(model, engine.optimizer, data, steps=3, accumulate=1, engine=engine)


def same_but_for_weights(a: nn.Module, b: nn.Module) -> None:
    """Structure, ties, dtypes, and the buffers' values, which are in no file."""
    assert type(a) is type(b) and a.training == b.training
    assert [(n, type(m), m.extra_repr()) for n, m in a.named_modules()] == [
        (n, type(m), m.extra_repr()) for n, m in b.named_modules()
    ]
    for tensors in ("named_parameters", "named_buffers"):
        mine, theirs = (list(getattr(m, tensors)()) for m in (a, b))
        assert [(n, t.shape, t.dtype, t.requires_grad) for n, t in mine] == [
            (n, t.shape, t.dtype, t.requires_grad) for n, t in theirs
        ]
    assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))
    assert a.config.to_dict() == {**b.config.to_dict(), "_name_or_path": a.config.to_dict().get("_name_or_path")}


# --- the same model


KINDS = [*STREAMED, "bert"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [  # the dtypes by turns; the others in `make test-all`
        pytest.param(kind, dtype, marks=[pytest.mark.full] if i % 2 == j else [])
        for i, kind in enumerate(KINDS)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_a_model_is_the_one_that_from_pretrained_gives(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = saved(tmp_path, kind, dtype)
    plain = type(model).from_pretrained(tmp_path, dtype=dtype).train()
    built = build_model(str(tmp_path), dtype=dtype)
    assert built.weights is not None and all(is_unmaterialized(param) for param in built.model.parameters())
    same_but_for_weights(built.model, plain)
    cells.assert_same(trained(built.model, kind, built.weights), trained(plain, kind))


@pytest.mark.parametrize("files", [torch.float16, torch.float32])
def test_files_of_another_dtype_give_what_from_pretrained_makes_of_them(tmp_path: Path, files: torch.dtype) -> None:
    saved(tmp_path, "llama", files, max_shard_size="20KB")
    plain = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    built = build_model(str(tmp_path), dtype=torch.bfloat16)
    assert {param.dtype for param in built.model.parameters()} == {torch.bfloat16}
    cells.assert_same(trained(built.model, "llama", built.weights), trained(plain, "llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_stored_in_another_form_is_loaded_by_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Mixtral: experts lie in the file one by one and are run as one tensor."""
    saved(tmp_path, "mixtral", dtype)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).train()
    before = os.listdir("/proc/self/fd")
    built = build_model(str(tmp_path), dtype=dtype)
    assert built.weights is None and os.listdir("/proc/self/fd") == before
    same_but_for_weights(built.model, plain)
    cells.assert_same(trained(built.model, "mixtral"), trained(plain, "mixtral"))


def test_weights_that_the_config_ties_and_the_file_has_apart_are_not_tied_as_in_transformers(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    state = load_file(tmp_path / SINGLE)
    head = state["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**state, "lm_head.weight": head}, tmp_path / SINGLE, metadata={"format": "pt"})
    plain = LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert torch.equal(plain.lm_head.weight, head), "or else transformers thinks otherwise by now"
    built = build_model(str(tmp_path), dtype=torch.float32)
    cells.assert_same(trained(built.model, "llama", built.weights), trained(plain, "llama"))


def test_weights_may_come_from_another_folder_than_the_config(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    zoo.make("llama", seed=5).save_pretrained(tmp_path / "later")
    built = build_model(str(tmp_path / "base"), dtype=torch.float32, weights_from=str(tmp_path / "later"))
    cells.assert_same(trained(built.model, "llama", built.weights), trained(zoo.make("llama", seed=5), "llama"))


def test_the_folder_may_be_named_by_its_config(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    built = build_model(str(tmp_path / "config.json"), dtype=torch.float32)
    cells.assert_same(trained(built.model, "llama", built.weights), trained(zoo.make("llama", seed=3), "llama"))


def test_random_weights_are_those_of_torchs_generator_and_need_no_files(tmp_path: Path) -> None:
    zoo.make("llama").config.save_pretrained(tmp_path)
    torch.manual_seed(7)
    built = build_model(str(tmp_path), dtype=torch.bfloat16, random=True)
    torch.manual_seed(7)
    plain = LlamaForCausalLM._from_config(LlamaConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    assert built.weights is None and built.model.training
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in built.model.state_dict().items())


def test_attention_is_the_one_that_is_requested(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    assert (
        build_model(str(tmp_path), dtype=torch.float32, attn_implementation="eager").model.config._attn_implementation
        == "eager"
    )


def test_an_export_of_what_was_built_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    """The generation config comes from the folder, too: a chat model's is more than its config's."""
    saved(tmp_path / "base", "llama")
    settings = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[2, 7], max_new_tokens=11)
    settings.save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "theirs")
    built = build_model(str(tmp_path / "base"), dtype=torch.float32)
    engine = outsize.prepare(built.model, zoo.batch("llama"), device="cpu", weights=built.weights)
    engine.export(tmp_path / "ours")
    engine.detach()
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == sorted(
        p.name for p in (tmp_path / "theirs").iterdir()
    )
    for path in (tmp_path / "ours").iterdir():
        assert path.read_bytes() == (tmp_path / "theirs" / path.name).read_bytes(), path.name


# --- refusals


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    state = load_file(tmp_path / SINGLE)
    del state["model.layers.1.mlp.down_proj.weight"]
    save_file(state, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(BadFile, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        build_model(str(tmp_path), dtype=torch.float32)


def test_a_base_without_its_head_is_not_trained_with_a_random_one(tmp_path: Path) -> None:
    untied = zoo.make("llama-untied", seed=3)
    LlamaModel.from_pretrained(None, config=untied.config, state_dict=untied.model.state_dict()).save_pretrained(
        tmp_path
    )
    with pytest.raises(BadFile, match=r"lacks lm_head\.weight"):
        build_model(str(tmp_path), dtype=torch.float32)


def test_old_names_and_a_base_without_its_prefix_are_found_by_transformers(tmp_path: Path) -> None:
    saved(tmp_path / "bert", "bert")
    state = load_file(tmp_path / "bert" / SINGLE)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    save_file(old, tmp_path / "bert" / SINGLE, metadata={"format": "pt"})
    assert old.keys() != state.keys()
    built = build_model(str(tmp_path / "bert"), dtype=torch.float32)
    cells.assert_same(trained(built.model, "bert", built.weights), trained(zoo.make("bert", seed=3), "bert"))
    zoo.make("llama", seed=3).model.save_pretrained(tmp_path / "base")
    built = build_model(str(tmp_path / "base"), dtype=torch.float32)
    cells.assert_same(trained(built.model, "llama", built.weights), trained(zoo.make("llama", seed=3), "llama"))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    zoo.make("gpt2").save_pretrained(tmp_path / "other")
    with pytest.raises(BadFile, match=" lacks "):
        build_model(str(tmp_path), dtype=torch.float32, weights_from=str(tmp_path / "other"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(BadFile, match=r"gate_proj\.weight has the shape .*\(50, 32\) in the model"):
        build_model(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    saved(tmp_path, "llama")
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(BadFile, match=str(path)):
        build_model(str(tmp_path), dtype=torch.float32)


def test_what_is_no_models_folder_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{]")
    with pytest.raises(ConfigError, match="transformers cannot load its config"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    with pytest.raises(ConfigError, match="transformers cannot load its config"):
        load_config(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_config(tmp_path / "elsewhere")
    zoo.make("llama").config.save_pretrained(tmp_path)
    with pytest.raises(BadFile, match=r"has neither model\.safetensors"):
        build_model(str(tmp_path), dtype=torch.float32)


def test_the_class_is_the_one_that_was_saved_or_the_language_model_of_that_kind() -> None:
    assert trainable_class(zoo.make("llama").config) is LlamaForCausalLM
    assert trainable_class(GPT2Config()).__name__ == "GPT2LMHeadModel"
    assert trainable_class(GPT2Config(architectures=["GPT2Model"])).__name__ == "GPT2LMHeadModel"
    assert trainable_class(zoo.make("t5").config).__name__ == "T5ForConditionalGeneration"
    with pytest.raises(ModelUnsupported, match=r"config names no architecture .*input_ids and labels"):
        trainable_class(ViTConfig())


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "BertForRewardOfMyOwn"])
def test_a_head_that_cannot_be_trained_or_is_not_known_is_not_exchanged_for_another(name: str) -> None:
    with pytest.raises(
        ModelUnsupported, match=f"names {name} .*prepare, or name BertLMHeadModel in its architectures if that is meant"
    ):
        trainable_class(BertConfig(architectures=[name]))


@pytest.mark.parametrize("name", ["./no/model", "/no/model", "~/model", "a/b/c"])
def test_a_folder_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_config(name)


def test_a_name_below_a_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^models/llama-8b: there is no such folder"):
        load_config("models/llama-8b")


def test_without_network_a_hub_id_may_be_a_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    with pytest.raises(
        ConfigError, match=r"^nobody/knows-this: there is no such folder, and the hub cannot be reached"
    ):
        load_config("nobody/knows-this")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=rf"has an adapter, not a whole model.* lora_model_dir: {tmp_path}\. Or merge it"
    ):
        load_config(tmp_path)
