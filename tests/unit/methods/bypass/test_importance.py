"""methods/bypass/importance.py against scores that are computed by hand, with hooks or by trying."""

import pytest
import torch
from pruning import layers, require_close, student, teacher, variant
from torch import Tensor, nn

from outsize.methods.bypass.importance import Importance, LayerImportance
from outsize.methods.bypass.subblocks import record
from outsize.model.stack import run


def inputs_of(module: nn.Module, parts, call, hidden: Tensor) -> Tensor:
    """What a module in a layer is given, (tokens, size)."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        run(parts.layer, call, hidden)
    handle.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])


def scores(parts, call, hidden: Tensor, method="independent", valid: Tensor | None = None) -> LayerImportance:
    importance = Importance(parts, method)
    with torch.no_grad():
        expected = run(parts.layer, call, hidden)
    assert torch.equal(importance.run(call, hidden, valid), expected)
    return importance.scores()


@pytest.mark.parametrize(
    ("kind", "module", "columns"),
    [("llama", "mlp.down_proj", 0), ("gpt2", "mlp.c_proj", 1), ("phi3", "mlp.down_proj", 0)],
)
def test_channels_by_size_and_column(kind: str, module: str, columns: int) -> None:
    parts, call, hidden = next(layers(teacher(kind)))
    down = parts.layer.get_submodule(module)
    activations = inputs_of(down, parts, call, hidden)
    expected = activations.abs().mean(0) * down.weight.detach().norm(dim=columns)
    require_close(scores(parts, call, hidden).channels["mlp"].double(), expected, 1e-5)


def test_channels_in_the_order_in_which_leaving_them_out_changes_least() -> None:
    """Against trying every channel at every step."""
    parts, call, hidden = next(layers(teacher("llama")))
    down = parts.layer.mlp.down_proj
    activations, weight = inputs_of(down, parts, call, hidden), down.weight.detach()
    left, order = list(range(48)), torch.zeros(48, dtype=torch.float64)
    for place in range(48):
        without = {c: [one for one in range(48) if one not in left or one == c] for c in left}
        errors = {c: (activations[:, gone] @ weight[:, gone].T).square().sum().item() for c, gone in without.items()}
        least = min(errors, key=errors.__getitem__)
        order[least] = place
        left.remove(least)
    found = scores(parts, call, hidden, "iterative").channels["mlp"]
    assert torch.equal(found.double()[:40].argsort(), order[:40].argsort())


def test_channels_of_experts_are_ranked_for_each() -> None:
    """Each expert's own tokens, with products of single experts and with grouped ones."""
    found = {}
    for implementation in ("eager", "grouped_mm"):
        model = teacher("mixtral", torch.float32)
        model.set_experts_implementation(implementation)
        parts, call, hidden = next(layers(model))
        found[implementation] = scores(parts, call, hidden)
    block = parts.layer.mlp
    x = parts.layer.post_attention_layernorm(
        record(parts.layer, parts.subblocks, ["ffn"], call, hidden)[1]["ffn"].input
    )
    x = x.reshape(-1, 32)
    picked = (x @ block.gate.weight.T).softmax(-1).topk(2)
    for importance in found.values():
        for expert in range(4):
            mine = (picked.indices == expert).any(-1)
            gate, up = (x[mine] @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
            sizes = (nn.functional.silu(gate) * up).abs().mean(0)
            expected = sizes * block.experts.down_proj[expert].norm(dim=0)
            require_close(importance.channels["mlp.experts"][expert], expected.detach(), 1e-4)
        share = torch.zeros(4).index_add_(0, picked.indices.flatten(), picked.values.flatten()) / len(x)
        require_close(importance.experts["mlp"], share.detach(), 1e-4)


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3"])
def test_heads_by_what_they_add_to_the_output(kind: str) -> None:
    parts, call, hidden = next(layers(teacher(kind)))
    output, heads = parts.layer.self_attn.o_proj, parts.shape.num_key_value_heads
    given = inputs_of(output, parts, call, hidden).view(len(hidden.flatten(0, 1)), heads, -1)
    weight = output.weight.detach().view(32, heads, -1)
    expected = torch.einsum("thd,ohd->hto", given, weight).norm(dim=-1).mean(1)
    require_close(scores(parts, call, hidden).heads["self_attn"].double(), expected, 1e-5)


@pytest.mark.parametrize("method", ["independent", "iterative"])
def test_batches_add_up_and_padding_does_not_count(method: str) -> None:
    parts, call, hidden = next(layers(teacher("llama")))
    whole = scores(parts, call, hidden, method)
    rows = Importance(parts, method)
    for row in hidden:
        rows.run(call, row.unsqueeze(0), None)
    for name, value in rows.scores().tensors().items():
        require_close(value, whole.tensors()[name], 1e-5)
    valid = torch.ones(hidden.shape[:2], dtype=torch.bool)
    valid[:, 9:] = False  # causal: what is before does not see it
    first = scores(parts, call, hidden, method, valid)
    other = torch.where(valid.unsqueeze(-1), hidden, torch.randn_like(hidden))
    for name, value in scores(parts, call, other, method, valid).tensors().items():
        require_close(value, first.tensors()[name], 1e-5)


@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3-moe", "deepseek-v3", "granite-moe", "gemma3", "llama4", "cohere2"])
def test_students_of_all_kinds_take_the_scores(kind: str) -> None:
    for parts, call, hidden in layers(teacher(kind, torch.float32)):
        found = scores(parts, call, hidden)
        saved = {name: tensor.clone() for name, tensor in found.tensors().items()}
        assert LayerImportance.of(saved).tensors().keys() == saved.keys()
        sizes = parts.shape
        variants = [
            variant("intermediate_size", sizes.intermediate_size // 2),
            *([variant("num_key_value_heads", 1, how="select")] if sizes.num_key_value_heads else []),
            *([variant("experts", 3)] if sizes.experts and kind != "deepseek-v3" else []),
        ]
        _, runs = record(parts.layer, parts.subblocks, parts.subblocks.keys(), call, hidden)
        for one in variants:
            made = student(parts, one, LayerImportance.of(saved))
            assert made(runs[one.learn]).isfinite().all()


def test_important_channels_reproduce_the_output_better_than_the_first() -> None:
    parts, call, hidden = next(layers(teacher("llama")))
    _, runs = record(parts.layer, parts.subblocks, ["ffn"], call, hidden)
    errors = []
    for importance in (None, scores(parts, call, hidden), scores(parts, call, hidden, "iterative")):
        made = student(parts, variant("intermediate_size", 24), importance)
        errors.append((made(runs["ffn"]) - runs["ffn"].target).square().sum().item())
    assert errors[1] < errors[0] and errors[2] < errors[0]
