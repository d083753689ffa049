"""model/stack.py: layers run one by one with the arguments that the model's own forward makes."""

from contextlib import contextmanager

import pytest
import torch
import zoo
from kinds.text import DECODERS, STATE_SPACES
from torch import nn

from outsize.base.errors import ModelUnsupported
from outsize.model.stack import LayerStack, run, valid_tokens

_NEEDS_OTHER_LAYERS = {"gemma3n": "model.layers.2", "gemma4": "model.layers.2"}
"""Keys and values are those of another layer from here on."""
KINDS = {**DECODERS, **STATE_SPACES}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in _NEEDS_OTHER_LAYERS])
def test_each_layer_alone_has_the_bits_of_the_models_forward(kind: str) -> None:
    model, (batch, other) = KINDS[kind].make(), KINDS[kind].data(2)
    stack = LayerStack(model)
    stack.check_replay(batch)
    # The check compares with the layers' inputs in the model's forward. Here each gets the output of the one before.
    captured = stack.capture(other)
    hidden = captured.hidden
    with torch.no_grad():
        for layer, call in zip(stack.layers, captured.calls, strict=True):
            hidden = run(layer.module, call, hidden)
    outputs = []
    handle = stack.layers[-1].module.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        model(**other, use_cache=False)
    handle.remove()
    assert torch.equal(hidden, outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0])


@pytest.mark.parametrize("kind", _NEEDS_OTHER_LAYERS)
def test_a_layer_that_needs_keys_of_another_is_named(kind: str) -> None:
    stack = LayerStack(KINDS[kind].make())
    with pytest.raises(ModelUnsupported, match=f"^{_NEEDS_OTHER_LAYERS[kind]}: run alone on the same hidden state, it"):
        stack.check_replay(KINDS[kind].data(1)[0])


def test_no_layer_runs_while_arguments_are_captured_and_forwards_stay() -> None:
    model = zoo.make("llama")
    ran = []
    for module in model.model.layers[0].modules():
        module.register_forward_hook(lambda module, *_: ran.append(module))
    model.lm_head.register_forward_hook(lambda module, *_: ran.append(module))
    stack = LayerStack(model)
    stack.capture(zoo.batch("llama"))
    assert all(module is model.model.layers[0] for module in ran), ran
    assert all("forward" not in layer.module.__dict__ for layer in stack.layers)


def test_the_head_is_not_replayed() -> None:
    """Its logits may take more memory than all layers."""
    model = zoo.make("llama")
    ran = []
    model.lm_head.register_forward_hook(lambda module, *_: ran.append(module))
    LayerStack(model).check_replay(zoo.batch("llama"))
    assert not ran and model.lm_head._forward_pre_hooks == {}
    model(**zoo.batch("llama"))
    assert ran == [model.lm_head]


def test_the_config_keeps_its_cache() -> None:
    """It goes into the folders of pruned models."""
    model = zoo.make("llama")
    model.config.use_cache = True
    stack = LayerStack(model)
    stack.check_replay(zoo.batch("llama"))
    assert model.config.use_cache is True
    assert all(call.kwargs["past_key_values"] is None for call in stack.capture(zoo.batch("llama")).calls)


def test_two_teacher_passes_agree_with_dropout() -> None:
    """D11."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    )
    stack = LayerStack(transformers.GPT2LMHeadModel(config).train())
    batch = zoo.batch("gpt2")
    stack.check_replay(batch)
    passes = []
    for _ in range(2):
        captured = stack.capture(batch)
        hidden = captured.hidden
        for layer, call in zip(stack.layers, captured.calls, strict=True):
            hidden = run(layer.module, call, hidden)
        passes.append(hidden)
    assert torch.equal(*passes)
    assert not any(module.training for module in stack.model.modules())


def test_masks_are_the_models_own() -> None:
    stack = LayerStack(zoo.make("gemma2"))
    batch = zoo.batch("gemma2")
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :5] = 0
    stack.check_replay({**batch, "attention_mask": mask})
    calls = stack.capture({**batch, "attention_mask": mask}).calls
    assert not torch.equal(calls[0].kwargs["attention_mask"], calls[1].kwargs["attention_mask"])  # a window, and all
    assert torch.equal(valid_tokens({"attention_mask": mask}), mask.bool())


def test_weights_are_given_while_they_are_read() -> None:
    """Outside of layers by module, of a layer all of them; never those of two layers at once."""
    model = zoo.make("llama")
    layers = [set(layer.parameters()) for layer in model.model.layers]
    present: list[set[nn.Parameter]] = []
    most = 0

    @contextmanager
    def materialized(params):
        nonlocal most
        present.append(set(params))
        most = max(most, sum(bool(given & layer) for layer in layers for given in present))
        yield
        present.remove(set(params))

    stack = LayerStack(model, materialized=materialized)
    stack.capture(zoo.batch("llama"))
    assert most == 0
    stack.check_replay(zoo.batch("llama"))
    assert most == 1 and not present


class _Scaled(zoo.PlainModel):
    """Changes the hidden state between layers."""

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) * 2
        return self.head(x)


class _Keeps(nn.Module):
    """A layer that adds its first input to all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(32, 32), None

    def forward(self, x):
        self.first = x if self.first is None else self.first
        return self.linear(x) + self.first


class _Writes(_Keeps):
    def forward(self, x):
        return x.add_(self.linear(x))


@pytest.mark.parametrize(
    ("layers", "wrong"),
    [
        ([_Keeps(), _Keeps()], "layers.0: run alone on the same hidden state, its output differs"),
        ([_Writes(), _Writes()], "layers.0: run alone on the same hidden state, it writes its input"),
    ],
)
def test_other_layers_are_refused(layers: list[nn.Module], wrong: str) -> None:
    model = zoo.PlainModel(num_blocks=1, loops=1, tied=False)
    model.layers = nn.ModuleList(layers)
    stack, batch = LayerStack(model), zoo.batch("plain")
    if isinstance(layers[0], _Keeps) and not isinstance(layers[0], _Writes):
        layers[0].first = torch.zeros(2, 16, 32)

        def forget(module, args):
            module.first = torch.rand(2, 16, 32)

        layers[0].register_forward_pre_hook(forget)
    with pytest.raises(ModelUnsupported, match=wrong):
        stack.check_replay(batch)


def test_models_whose_layers_do_not_follow_one_another_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match=r"layers\.1: the model changes the hidden state before this layer"):
        LayerStack(_Scaled(num_blocks=2, loops=1, tied=False)).capture(zoo.batch("plain"))
    with pytest.raises(ModelUnsupported, match=r"layers\.0: the model runs it out of order or several times"):
        LayerStack(zoo.PlainModel(num_blocks=2, loops=2, tied=False)).check_replay(zoo.batch("plain"))
