"""methods/bypass/subblocks.py: sub-blocks are found by running a layer, and recorded in the teacher's forward."""

import dataclasses

import pytest
import torch
from kinds.text import DECODERS, STATE_SPACES

from outsize.methods.bypass.subblocks import SubBlock, find_subblocks, record
from outsize.model.stack import LayerStack, run

KINDS = {**DECODERS, **STATE_SPACES}
LLAMA = {"attention": ("self_attn", "input_layernorm"), "ffn": ("mlp", "post_attention_layernorm")}
GPT2 = {"attention": ("attn", "ln_1"), "ffn": ("mlp", "ln_2")}
PARALLEL = {"attention": ("self_attn", None), "ffn": ("mlp", None)}  # one norm for both
FOUND = {
    **dict.fromkeys(("llama", "qwen3", "mixtral", "qwen3-moe", "phi3", "gpt-oss", "deepseek-v3", "starcoder2"), LLAMA),
    **dict.fromkeys(("gpt2", "gpt-neo"), GPT2),
    **dict.fromkeys(("phi", "cohere2"), PARALLEL),
    "olmo2": PARALLEL,  # norms behind the modules
    "gemma3": {"attention": ("self_attn", "input_layernorm"), "ffn": ("mlp", "pre_feedforward_layernorm")},
    "gpt-neox": {"attention": ("attention", "input_layernorm"), "ffn": ("mlp", "post_attention_layernorm")},
    "falcon": {"attention": ("self_attention", None), "ffn": ("mlp", None)},
    "granite-moe": {
        "attention": ("self_attn", "input_layernorm"),
        "ffn": ("block_sparse_moe", "post_attention_layernorm"),
    },
    "llama4": {"attention": ("self_attn", "input_layernorm"), "ffn": ("feed_forward", "post_attention_layernorm")},
    "jamba": {"mixer": ("mamba", "input_layernorm"), "ffn": ("feed_forward", "pre_ff_layernorm")},
    "mamba2": {"mixer": ("mixer", "norm")},
    "lfm2": {"mixer": ("conv", "operator_norm"), "ffn": ("feed_forward", "ffn_norm")},
    "opt": {"attention": ("self_attn", "self_attn_layer_norm")},  # fc1 and fc2 are in no module
    "bloom": {},  # its modules add the residual themselves
}


def layers_of(kind: str):
    """Each layer with its call and its hidden state."""
    stack = LayerStack(KINDS[kind].make())
    captured = stack.capture(KINDS[kind].data(1)[0])
    hidden = captured.hidden
    for layer, call in zip(stack.layers, captured.calls, strict=True):
        yield layer.module, call, hidden
        with torch.no_grad():
            hidden = run(layer.module, call, hidden)


@pytest.mark.parametrize("kind", FOUND)
def test_subblocks_of_the_first_layer(kind: str) -> None:
    layer, call, hidden = next(layers_of(kind))
    found = find_subblocks(layer, call, hidden)
    assert {name: (one.module, one.norm) for name, one in found.items()} == FOUND[kind]


def test_attention_is_found_where_the_last_token_sees_no_other() -> None:
    """As padding of a packed row, or the first token of a document."""
    layer, call, hidden = next(layers_of("llama"))
    mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    mask[-1, :-1] = False
    alone = dataclasses.replace(call, kwargs={**call.kwargs, "attention_mask": mask.expand(len(hidden), 1, -1, -1)})
    found = find_subblocks(layer, alone, hidden)
    assert {name: (one.module, one.norm) for name, one in found.items()} == LLAMA


def test_layers_of_a_hybrid_differ() -> None:
    kinds = [sorted(find_subblocks(*layer)) for layer in layers_of("qwen3-next")]
    assert kinds == [["ffn", "mixer"], ["attention", "ffn"], ["ffn", "mixer"]]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma3", "falcon", "llama4", "cohere2"])
def test_what_is_recorded_makes_up_the_layer(kind: str) -> None:
    """Each module alone gives the recorded target; the layer gives the same with and without being recorded."""
    for layer, call, hidden in layers_of(kind):
        found = find_subblocks(layer, call, hidden)
        with torch.no_grad():
            expected = run(layer, call, hidden)
        output, runs = record(layer, found, ["attention", "ffn", "block"], call, hidden)
        assert torch.equal(output, expected)
        assert torch.equal(runs["block"].target, expected.float() - hidden.float())
        for name, subblock in found.items():
            given = runs[name].input
            with torch.no_grad():
                given = layer.get_submodule(subblock.norm)(given) if subblock.norm else given
                out = run(layer.get_submodule(subblock.module), runs[name].call, given)
            assert torch.equal(out.reshape(hidden.shape), runs[name].target), name
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def test_only_what_is_learned_is_recorded() -> None:
    layer, call, hidden = next(layers_of("llama"))
    _, runs = record(layer, find_subblocks(layer, call, hidden), ["ffn"], call, hidden)
    assert list(runs) == ["ffn"]


def test_paths_that_are_given_replace_those_found() -> None:
    layer, call, hidden = next(layers_of("llama"))
    given = {"ffn_norm": "input_layernorm", "attention": "no_such_module"}
    found = find_subblocks(layer, call, hidden, given)
    assert found["ffn"] == SubBlock(kind="ffn", module="mlp", norm="input_layernorm", num_outputs=0)
    assert (found["attention"].module, found["attention"].num_outputs) == ("self_attn", 2)
