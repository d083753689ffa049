"""The loss in chunks is the model's own to rounding, is there in training with labels alone, and leaves no trace. Where
it cannot be, the reason is named.
"""

import contextlib
import copy
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import zoo
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported
from outsize.loss import chunked_loss as chosen
from outsize.loss.chunked_loss import ChunkedLossPatch, ChunkedLossUnsupported, trace_with_loss
from outsize.loss.logits import Logits
from outsize.model.tensors import map_tensors, with_grad
from outsize.schedule.check import load, save
from outsize.schedule.render import render

peft = pytest.importorskip("peft")
CHUNK = 5
_SMALL = dict(
    vocab_size=zoo.VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _random(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def lora(kind: str = "llama", **config: Any) -> nn.Module:
    model = peft.get_peft_model(
        zoo.make(kind), peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **config})
    )
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return model.train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        kind: (lambda kind=kind: zoo.make(kind))
        for kind in ("llama", "llama-untied", "qwen3", "gemma2", "gpt2", "mixtral")
    },
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**_SMALL, logits_scaling=3.0)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**_SMALL, logit_scale=0.25)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**_SMALL)),  # has a bias
    "lora": lora,
}


def bart() -> nn.Module:
    small = dict(
        vocab_size=zoo.VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        pad_token_id=0,
    )
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**small, encoder_attention_heads=2, decoder_attention_heads=2)
    )


def batch(kind: str = "llama", **how: Any) -> dict[str, Tensor]:
    made = zoo.batch(kind, **how)
    made["labels"][0, 3:9] = -100
    return made


@contextlib.contextmanager
def in_chunks(model: nn.Module, chunk: int = CHUNK) -> Iterator[ChunkedLossPatch]:
    patch = ChunkedLossPatch(model, chunk)
    patch.attach()
    try:
        yield patch
    finally:
        patch.detach()


def run(model: nn.Module, given: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(1)
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def compare(model: nn.Module, given: dict[str, Any], *, loss: float = 1e-6, gradients: float = 1e-5) -> None:
    expected, grads = run(model, given)
    with in_chunks(model):
        found, ours = run(model, given)
    assert isinstance(found.logits, Logits) and (found.logits.shape, found.logits.dtype) == (
        expected.logits.shape,
        expected.logits.dtype,
    )
    assert found.loss.dtype == expected.loss.dtype and distance(found.loss, expected.loss) < loss
    assert ours.keys() == grads.keys()
    for name, grad in grads.items():
        assert ours[name].dtype == grad.dtype and distance(ours[name], grad) < gradients, name


# --- the same loss


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_full_logits(name: str) -> None:
    model = _random(MODELS[name])
    compare(model, batch())
    compare(model, {**batch(seed=1), "num_items_in_batch": torch.tensor(40)})


def test_a_router_loss_beside_it_is_kept() -> None:
    compare(zoo.make("mixtral"), {**batch(), "output_router_logits": True})


def test_labels_that_are_shifted_already_are_taken_as_they_are() -> None:
    shifted = torch.randint(0, zoo.VOCAB, (2, 16))
    compare(zoo.make("llama"), {**batch(), "shift_labels": shifted})


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi"])
def test_under_autocast_it_is_the_head_of_autocast(name: str) -> None:
    model = _random(MODELS[name])
    with torch.autocast("cpu", torch.bfloat16):
        compare(model, batch(), gradients=1e-2)


def test_in_bf16_too() -> None:
    compare(zoo.make("llama", torch.bfloat16), batch(), gradients=2e-2)


@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model: Any = zoo.make("llama-untied")
    for name, param in model.named_parameters():
        param.requires_grad_(("lm_head" in name) == (frozen != "head"))
    compare(model, batch())


def test_a_batch_without_anything_to_learn_is_as_in_torch() -> None:
    model, given = zoo.make("llama"), batch()
    given["labels"].fill_(-100)
    with in_chunks(model):
        out, grads = run(model, given)
    assert out.loss.isnan() and not any(grad.any() for grad in grads.values())


def test_as_many_labels_as_tokens_are_expected() -> None:
    model, given = zoo.make("llama"), batch()
    with in_chunks(model), pytest.raises(ValueError, match="32 tokens, but there are 8"):
        model(input_ids=given["input_ids"], labels=given["labels"][:, :4])


def test_the_columns_of_a_padded_head_can_be_cut_off() -> None:
    class Padded(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)[..., 3:90].float()[:, :, :80]
            return transformers.modeling_outputs.CausalLMOutput(
                loss=self.loss_function(logits, labels, 80), logits=logits
            )

    model = zoo.make("llama")
    model.__class__ = Padded
    given = batch()
    given["labels"] = given["labels"].clamp(max=79)
    compare(model, given)


# --- where it is, and where not


def test_only_training_forwards_with_labels_are_in_chunks() -> None:
    model: Any = zoo.make("llama")
    given = batch()
    expected = model(**given).logits
    with in_chunks(model) as patch:
        assert isinstance(model(**given).logits, Logits)
        assert isinstance(
            model(given["input_ids"], None, None, None, None, given["labels"]).logits, Logits
        )  # by position
        assert torch.equal(model(given["input_ids"]).logits, expected)
        with torch.no_grad():
            assert torch.equal(model(**given).logits, expected)
        model.eval()  # a way to train without dropout
        assert isinstance(model(**given).logits, Logits)
        assert model.generate(given["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 18)
        model.train()
        patch.detach()
        patch.attach(on=False)
        assert torch.equal(model(**given).logits, expected)


def test_detach_leaves_nothing_behind() -> None:
    for make in (MODELS["llama"], lora):
        model = _random(make)
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        with in_chunks(model):
            run(model, batch())
            signature = inspect.signature(model.forward)
        model.zero_grad()
        after = {name: dict(vars(module)) for name, module in model.named_modules()}
        assert {name: found.keys() for name, found in after.items()} == {
            name: found.keys() for name, found in before.items()
        }
        assert inspect.signature(model.forward) == signature
        copy.deepcopy(model)


def test_a_forward_and_a_loss_that_were_set_before_come_back() -> None:
    model: Any = zoo.make("llama")
    mine = convert_outputs_to_fp32(model.forward)
    model.forward, model.loss_function = mine, model.loss_function
    with in_chunks(model):
        assert isinstance(model(**batch()).logits, Logits)
    assert vars(model)["forward"] is mine and vars(model)["_loss_function"] is model.loss_function


def test_outputs_pass_through_what_handles_outputs() -> None:
    model = zoo.make("llama", torch.bfloat16)
    with in_chunks(model):
        out = convert_outputs_to_fp32(model.forward)(**batch())
    assert out.logits.dtype == torch.float32 and isinstance(out.logits, Logits) and not out.logits.requires_grad
    assert out.loss.requires_grad and with_grad(out) == [out.loss]
    assert (
        map_tensors(lambda t: t, out).logits is out.logits and tree_map(lambda t: t, dict(out))["logits"] is out.logits
    )
    assert (
        out.to_tuple()[1] is out.logits
        and "not materialized" in repr(out)
        and len(out.logits) == 2
        and out.logits.dim() == 3
    )
    del out.logits


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.argmax(-1),
        lambda x: x.detach(),
        lambda x: x + 1,
        lambda x: x[:, -1],
        lambda x: x.tolist(),
        lambda x: x.data,
        lambda x: x.cpu().numpy(),
        lambda x: torch.stack([x, x]),
        lambda x: x * x,
        lambda x: torch.ones(()) * x,
        lambda x: x.to(torch.float64),
        lambda x: copy.deepcopy(x),
    ],
)
def test_reading_the_logits_says_what_to_do(use: Callable[[Tensor], Any]) -> None:
    model = zoo.make("llama")
    with in_chunks(model):
        out = model(**batch())
    with pytest.raises(EngineMisuse, match=r"after the loss.*chunked_loss=False"):
        use(out.logits)


def test_outputs_that_are_held_hold_no_activations() -> None:
    model = zoo.make("llama")
    with in_chunks(model):
        out = model(**batch())
    assert out.logits._product.hidden is None


# --- models that do otherwise


def reason(model: nn.Module, given: dict[str, Any], **how: Any) -> str:
    """What the plan says."""
    found, words = trace_with_loss(model.train(), given, lambda _: model(**given).loss, wanted=None, **how)
    assert found.requires_grad
    assert "forward" not in vars(model)
    return words.text


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "chunk_tokens", lambda vocab_size: CHUNK)


OTHERS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "bart": (bart, "llama", "add between the head and the loss"),
    "t5": (lambda: zoo.make("t5"), "t5", "view between the head and the loss"),
    "bert": (lambda: zoo.make("bert"), "bert", "it has no output embedding"),
    "plain": (lambda: zoo.make("plain"), "plain", "PlainModel is no model of transformers"),
    "lora on the head": (
        lambda: lora("llama-untied", target_modules=["lm_head"]),
        "llama",
        "its output embedding is no plain Linear but a peft.tuners.lora.layer.Linear",
    ),
    "a saved head": (
        lambda: lora("llama-untied", modules_to_save=["lm_head"]),
        "llama",
        "its output embedding is no plain Linear but a peft.",
    ),
}


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(("make", "kind", "why"), OTHERS.values(), ids=OTHERS)
def test_models_that_do_otherwise_keep_their_way_and_the_plan_says_why(
    make: Callable[[], nn.Module], kind: str, why: str
) -> None:
    model = make().train()
    assert reason(model, zoo.batch(kind)).startswith(f"full logits: {why}")
    with pytest.raises(ChunkedLossUnsupported, match=why):
        trace_with_loss(model, zoo.batch(kind), lambda _: model(**zoo.batch(kind)), wanted=True)


@pytest.mark.usefixtures("_small_chunks")
def test_models_with_other_losses_are_named() -> None:
    model: Any = zoo.make("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    assert reason(model, batch()) == "full logits: its loss is <lambda>"

    class Forgetful(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            return transformers.modeling_outputs.CausalLMOutput(loss=hidden.mean(), logits=self.lm_head(hidden))

    model = zoo.make("llama")
    model.__class__ = Forgetful
    assert reason(model, batch()) == "full logits: a forward that does not give its logits to its loss_function"


@pytest.mark.usefixtures("_small_chunks")
def test_a_head_in_fp16_is_left_alone() -> None:
    with torch.autocast("cpu", torch.float16):
        assert reason(zoo.make("llama"), batch()) == "full logits: a head that computes in float16"


@pytest.mark.usefixtures("_small_chunks")
def test_it_is_used_where_it_saves_something() -> None:
    model, given = zoo.make("llama"), batch()
    assert reason(model, given) == "in chunks of 5 tokens"
    assert reason(model, given, is_custom=True) == "full logits: the loop computes its own loss"
    small = {name: value[:1, :5] for name, value in given.items()}
    assert reason(model, small) == "full logits: 5 tokens are no more than a chunk of 5"
    before = trace_with_loss(model, given, lambda _: None, wanted=None)[1]
    assert reason(model, small, before=before) == "in chunks of 5 tokens", "what was in chunks stays so"
    full = chosen.ChosenLoss(text="full logits, as requested")
    assert trace_with_loss(model, given, lambda loss: loss, wanted=False) == (full, full)
    assert trace_with_loss(model, small, lambda loss: loss.text, wanted=True)[0] == "in chunks of 5 tokens"


def test_small_models_keep_their_loss() -> None:
    assert reason(zoo.make("llama"), batch()).startswith("full logits: 32 tokens are no more than a chunk of")


# --- through prepare


@pytest.mark.usefixtures("_small_chunks")
def test_the_plan_says_of_it_and_a_given_plan_agrees(tmp_path: Any) -> None:
    def prepare(**how: Any) -> Any:
        return outsize.prepare(zoo.make("llama"), batch(), device="sim:64MiB", host_memory="64MiB", **how)

    engine = prepare()
    made, layout, graph = engine.plan, engine.layout, engine.graph
    assert made.loss == "in chunks of 5 tokens" and "\nloss in chunks of 5 tokens\n" in render(made, graph, layout)
    assert isinstance(engine.model(**batch()).logits, Logits)
    engine.close()
    assert not {"forward", "_loss_function"} & vars(engine.model).keys() and "forward" not in vars(engine.model.lm_head)

    save(made, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == made
    again = prepare(plan=tmp_path / "plan.json")
    assert isinstance(again.model(**batch()).logits, Logits)
    again.close()
    with pytest.raises(ConfigError, match="its loss is in chunks of 5 tokens and chunked_loss is False"):
        prepare(plan=made, chunked_loss=False)

    engine = prepare(chunked_loss=False)
    full = engine.plan
    assert full.loss == "full logits, as requested" and not isinstance(engine.model(**batch()).logits, Logits)
    engine.close()
    again = prepare(plan=full)
    assert not isinstance(again.model(**batch()).logits, Logits)
    again.close()


def test_plans_that_do_not_say_of_their_loss_can_be_read_and_mean_full_logits(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = outsize.prepare(zoo.make("llama"), batch(), device="sim:64MiB", host_memory="64MiB")
    save(engine.plan, tmp_path / "plan.json")
    engine.close()
    fields = json.loads((tmp_path / "plan.json").read_text())
    del fields["loss"]
    (tmp_path / "old.json").write_text(json.dumps(fields))
    assert load(tmp_path / "old.json").loss == ""
    monkeypatch.setattr(chosen, "chunk_tokens", lambda vocab_size: CHUNK)
    engine = outsize.prepare(
        zoo.make("llama"), batch(), device="sim:64MiB", host_memory="64MiB", plan=tmp_path / "old.json"
    )
    assert not isinstance(engine.model(**batch()).logits, Logits)
    engine.close()


@pytest.mark.usefixtures("_small_chunks")
def test_asked_for_and_impossible_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match=r"view between the head and the loss.*chunked_loss"):
        outsize.prepare(zoo.make("t5"), zoo.batch("t5"), device="sim:64MiB", chunked_loss=True)


@pytest.mark.usefixtures("_small_chunks")
def test_a_preview_leaves_the_model_alone() -> None:
    model = zoo.make("llama")
    before = dict(vars(model))
    from outsize.setup.prepare import preview

    assert preview(model, batch(), device="sim:64MiB").plan.loss == "in chunks of 5 tokens"
    assert vars(model) == before


@pytest.mark.usefixtures("_small_chunks")
def test_a_cached_trace_knows_its_loss(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    for how in (None, False, None, False):
        engine = outsize.prepare(zoo.make("llama"), batch(), device="sim:64MiB", chunked_loss=how)
        assert engine.plan.held_bytes == (4 if how is None else 4 + 2 * 16 * zoo.VOCAB * 4)
        engine.detach()
    assert len(list(tmp_path.rglob("*.json"))) == 2


@pytest.mark.usefixtures("_small_chunks")
def test_the_forecast_says_of_it_too() -> None:
    config = zoo.make("llama").config  # type: ignore[union-attr]
    config.architectures = ["LlamaForCausalLM"]
    made = outsize.plan(config, sequence_len=24, hardware="64MiB")
    assert made.plan.loss == "in chunks of 5 tokens" and "loss in chunks" in str(made)
    assert (
        outsize.plan(config, sequence_len=24, hardware="64MiB", chunked_loss=False).plan.loss
        == "full logits, as requested"
    )
