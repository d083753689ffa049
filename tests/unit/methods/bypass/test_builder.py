"""methods/bypass/builder.py in fp64: a pruned sub-block is the teacher's with the pruned parts masked, repeated or zeroed
by hand. What is compared with uses none of the code under test.
"""

import copy
from itertools import product

import pytest
import torch
import zoo
from pruning import first_layer, layers, require_close, student, teacher, variant
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.methods.bypass.builder import build_student, config_sizes, student_numels
from outsize.methods.bypass.importance import LayerImportance
from outsize.methods.bypass.layouts import inspect_layer
from outsize.methods.bypass.losses import LOSSES
from outsize.methods.bypass.subblocks import SubBlockRun, record
from outsize.methods.bypass.variants import Change, Variant
from outsize.model.stack import LayerCall, run

DOWN: dict[str, tuple[str, int]] = {
    # By kind: the output projection of the first layer's feed-forward part, and the dimension of its inputs.
    "llama": ("mlp.down_proj.weight", 1),
    "qwen3": ("mlp.down_proj.weight", 1),
    "gpt2": ("mlp.c_proj.weight", 0),
    "phi3": ("mlp.down_proj.weight", 1),
    "starcoder2": ("mlp.c_proj.weight", 1),
    "gemma3": ("mlp.down_proj.weight", 1),
    "falcon": ("mlp.dense_4h_to_h.weight", 1),
    "mixtral": ("mlp.experts.down_proj", 2),
    "gpt-oss": ("mlp.experts.down_proj", 1),
    "granite-moe": ("block_sparse_moe.experts.down_proj", 2),
}
"""Biases: llama, gpt2, starcoder2, gpt-oss. Fused: phi3 (halves), mixtral (halves), gpt-oss (alternating)."""


def tolerance(kind: str) -> float:
    return 1e-6 if kind in ("gpt-oss", "gpt2", "falcon") else 1e-10  # a softmax or an activation in fp32


def ffn_scores(kind: str, width: int) -> tuple[LayerImportance, Tensor]:
    """Scores that keep scattered channels, of experts each others; and the channels that are kept, one row an expert."""
    rng = torch.Generator().manual_seed(1)
    path, _ = DOWN[kind]
    unit = path.rpartition(".")[0] if "experts" in path else path.rpartition(".")[0].rpartition(".")[0]
    shape = (4, width) if kind in ("mixtral", "gpt-oss", "granite-moe") else (width,)
    scores = torch.rand(shape, generator=rng)
    best = scores.argsort(-1, descending=True)
    return LayerImportance({unit: scores}, {}, {}), best if best.dim() == 2 else best.unsqueeze(0)


@pytest.mark.parametrize("kind", DOWN)
def test_a_narrow_ffn_is_the_teachers_with_removed_channels_masked(kind: str) -> None:
    """D20."""
    parts, runs = first_layer(teacher(kind))
    width = parts.shape.intermediate_size
    assert width == (128 if kind in ("gpt2", "falcon") else 48)
    importance, best = ffn_scores(kind, width)
    made = student(parts, variant("intermediate_size", 20), importance)
    masked = copy.deepcopy(parts.layer)
    path, dim = DOWN[kind]
    weight = masked.get_parameter(path).data
    for expert, order in enumerate(best):
        (weight if weight.dim() == 2 else weight[expert]).index_fill_(dim - (weight.dim() == 3), order[20:], 0)
    _, expected = first_layer_of(masked, parts, runs)
    require_close(made(runs["ffn"]), expected["ffn"].target, tolerance(kind))
    # What has one value for each output is whole.
    for name, tensor in made.layer_tensors().items():
        own = parts.layer.state_dict()[name]
        if name.rpartition(".")[0] == path.rpartition(".")[0] and tensor.dim() == 1:
            assert torch.equal(tensor, own)


def first_layer_of(layer: nn.Module, parts, runs):
    """Another layer's sub-blocks, given what the teacher's were given."""
    given = runs["block"]
    _, recorded = record(layer, parts.subblocks, parts.subblocks.keys(), given.call, given.input)
    return layer, recorded


def repeated(tensor: Tensor, heads: int, how: str, chosen: list[int]) -> Tensor:
    """(heads × size, ...) with the heads of each pair made equal."""
    size = len(tensor) // heads
    whole = tensor.clone().view(heads, size, *tensor.shape[1:])
    for group, pick in enumerate(chosen):
        pair = whole[2 * group : 2 * group + 2]
        pair[:] = pair.mean(0) if how == "average" else pair[pick].clone()
    return whole.view_as(tensor)


@pytest.mark.parametrize("how", ["average", "select", "first"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "olmo2", "starcoder2", "gpt-oss", "gemma3", "cohere2"])
def test_fewer_kv_heads_are_the_teachers_with_those_heads_repeated(kind: str, how: str) -> None:
    """D19."""
    parts, runs = first_layer(teacher(kind))
    heads = parts.shape.num_key_value_heads
    scores = torch.tensor([0.1, 0.4, 0.3, 0.2][:heads])
    chosen = [1, 0][: heads // 2] if how == "select" else [0, 0][: heads // 2]
    importance = LayerImportance({}, {"self_attn": scores}, {})
    made = student(parts, variant("num_key_value_heads", heads // 2, how=how), importance)
    other = copy.deepcopy(parts.layer)
    attention = other.self_attn
    if kind == "phi3":
        weight, size = attention.qkv_proj.weight.data, attention.head_dim
        queries = len(weight) - 2 * heads * size
        for first in (queries, queries + heads * size):
            part = slice(first, first + heads * size)
            weight[part] = repeated(weight[part], heads, how, chosen)
    else:
        for name in ("k_proj", "v_proj", *(["k_norm"] if kind == "olmo2" else [])):
            for tensor in getattr(attention, name).parameters():
                tensor.data.copy_(repeated(tensor.data, heads, how, chosen))
    _, expected = first_layer_of(other, parts, runs)
    require_close(made(runs["attention"]), expected["attention"].target, 1e-6 if kind == "gpt-oss" else 1e-10)
    # Queries and the output projection, with its bias, are whole.
    for name, tensor in made.layer_tensors().items():
        if "o_proj" in name or "q_proj" in name or "q_norm" in name:
            assert torch.equal(tensor, parts.layer.state_dict()[name]), name


def test_all_kv_heads_are_averaged_into_one() -> None:
    parts, runs = first_layer(teacher("llama"))
    made = student(parts, variant("num_key_value_heads", 1))
    key = parts.layer.self_attn.k_proj
    require_close(made.layer_tensors()["self_attn.k_proj.weight"], key.weight.view(4, 8, 32).mean(0))
    require_close(made.layer_tensors()["self_attn.k_proj.bias"], key.bias.view(4, 8).mean(0))
    assert made(runs["attention"]).isfinite().all()


def test_fewer_experts_are_those_that_are_left() -> None:
    """Against a mixture of experts that is written out."""
    parts, runs = first_layer(teacher("mixtral"))
    assert (parts.shape.experts, parts.shape.experts_per_token) == (4, 2)
    importance = LayerImportance({}, {}, {"mlp": torch.tensor([0.3, 0.1, 0.2, 0.4])})
    made = student(parts, variant("experts", 3), importance)
    block, left = parts.layer.mlp, [0, 2, 3]
    x = parts.layer.post_attention_layernorm(runs["ffn"].input)
    weights, picked = (x @ block.gate.weight[left].T).softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for place, expert in enumerate(left):
        gate, up = (x @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
        out = (nn.functional.silu(gate) * up) @ block.experts.down_proj[expert].T
        expected += out * (weights * (picked == place)).sum(-1, keepdim=True)
    require_close(made(runs["ffn"]), expected, 1e-6)  # the router's softmax is in fp32


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss", "granite-moe", "deepseek-v3", "llama4"])
def test_all_experts_are_kept_in_order(kind: str) -> None:
    """With as many experts as the teacher has, and with a width of its own, the student is the teacher."""
    for parts, call, hidden in layers(teacher(kind)):
        if parts.shape.experts is None:
            continue
        _, runs = first_layer_of(parts.layer, parts, {"block": given(call, hidden)})
        for kind_of_change, size in (("experts", 4), ("intermediate_size", parts.shape.intermediate_size)):
            made = student(parts, variant(kind_of_change, size))
            assert torch.equal(made(runs["ffn"]), runs["ffn"].target)
        if kind == "deepseek-v3":
            with pytest.raises(ModelUnsupported, match="cannot choose among 2 experts"):  # two groups of at least two
                student(parts, variant("experts", 2))
        else:
            assert student(parts, variant("experts", 2))(runs["ffn"]).shape == runs["ffn"].target.shape
        return
    raise AssertionError("no layer with experts")


def given(call, hidden):
    return SubBlockRun(hidden, call, hidden)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mixtral", "cohere2"])
@pytest.mark.parametrize("skipped", [("attention",), ("ffn",), ("attention", "ffn")])
def test_a_skipped_subblock_is_the_teachers_with_its_output_zeroed(kind: str, skipped: tuple[str, ...]) -> None:
    parts, runs = first_layer(teacher(kind))
    changes = tuple(Change(subblock=one, kind="skip") for one in skipped)
    made = build_student(parts, Variant(learn="block", changes=changes))
    handles = [
        parts.layer.get_submodule(parts.subblocks[one].module).register_forward_hook(
            lambda module, args, output: output * 0 if isinstance(output, Tensor) else (output[0] * 0, *output[1:])
        )
        for one in skipped
    ]
    with torch.no_grad():
        expected = run(parts.layer, runs["block"].call, runs["block"].input)
    for handle in handles:
        handle.remove()
    require_close(made(runs["block"]), (expected.float() - runs["block"].input.float()))
    for one in skipped:
        alone = build_student(parts, variant("skip", subblock=one))
        assert not alone(runs[one]).any() and not list(alone.parameters()) and not alone.layer_tensors()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "gpt-neox", "falcon", "qwen2"])
def test_a_linear_map_is_attention_of_a_token_that_sees_itself_alone(kind: str) -> None:
    """But for its biases."""
    parts, runs = first_layer(teacher(kind))
    made = student(parts, variant("linear"))
    attention = parts.layer.get_submodule(parts.subblocks["attention"].module)
    for module in attention.modules():
        if getattr(module, "bias", None) is not None and isinstance(module.bias, Tensor):
            module.bias.data.zero_()
    _, expected = first_layer_of(parts.layer, parts, runs)
    require_close(made(runs["attention"])[:, 0], expected["attention"].target[:, 0], 1e-6)
    (name,) = (name for name in made.layer_tensors() if "norm" not in name and "ln" not in name)
    assert name == f"{parts.subblocks['attention'].module}.linear.weight"


def test_attention_that_is_not_linear_for_one_token_has_no_linear_map() -> None:
    for kind in ("gpt-oss", "deepseek-v3"):  # sinks; low-rank values
        parts, _ = first_layer(teacher(kind))
        assert not parts.shape.has_linear_attention_map


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_copy_has_a_loss_and_gradients_of_exactly_zero(kind: str, dtype: torch.dtype) -> None:
    """D16."""
    parts, runs = first_layer(teacher(kind, dtype))
    copies = [variant("copy", subblock=subblock) for subblock in parts.subblocks]
    block = Variant(learn="block", changes=tuple(Change(subblock=one, kind="copy") for one in parts.subblocks))
    for one, loss in product((*copies, block), LOSSES.values()):
        made = build_student(parts, one)
        given = runs[one.learn]
        value = loss(made(given), given.target, None)
        value.backward()
        grads = [param.grad for param in made.parameters()]
        assert value == 0 and all(grad is None or not grad.any() for grad in grads)
        assert sum(grad is not None for grad in grads) > 2


@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral", "gpt2"])
def test_a_block_has_the_changes_of_its_subblocks(kind: str) -> None:
    parts, runs = first_layer(teacher(kind))
    narrow = Change(subblock="ffn", kind="intermediate_size", count=20)
    heads = parts.shape.num_key_value_heads
    fewer = (
        Change(subblock="attention", kind="num_key_value_heads", count=heads // 2, how="average")
        if heads
        else Change(subblock="attention", kind="skip")
    )
    made = build_student(parts, Variant(learn="block", changes=(fewer, narrow)))
    tensors = made.layer_tensors()
    for change in (fewer, narrow):
        alone = build_student(parts, Variant(learn=change.subblock, changes=(change,))).layer_tensors()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in alone.items())
    assert made(runs["block"]).isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt-oss"])
def test_students_keep_the_teachers_dtypes_and_share_no_memory(kind: str) -> None:
    model = teacher(kind, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts, runs = first_layer(model)
    variants = [
        variant("intermediate_size", 16),
        variant("copy", subblock="attention"),
        *([variant("num_key_value_heads", 1)] if parts.shape.num_key_value_heads else [variant("linear")]),
        Variant(learn="block", changes=(Change(subblock="ffn", kind="intermediate_size", count=8),)),
    ]
    for one in variants:
        made = build_student(parts, one)
        assert {param.dtype for param in made.parameters()} == {torch.bfloat16}
        assert not made.training and all(param.requires_grad for param in made.parameters())
        planned = student_numels(parts, one)
        assert sorted(planned.values(), key=str) == sorted(
            ((param.numel(), param.dtype) for param in made.parameters()), key=str
        )
        made(runs[one.learn]).float().sum().backward()
        with torch.no_grad():
            for param in made.parameters():
                param.fill_(3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def test_a_student_of_a_layer_in_one_buffer_copies_its_own_weights_alone() -> None:
    parts, runs = first_layer(teacher("llama", torch.bfloat16))
    buffer = torch.zeros(100_000, dtype=torch.bfloat16)
    end = 0
    for param in parts.layer.parameters():
        param.data = buffer[end : end + param.numel()].copy_(param.data.flatten()).view(param.shape)
        end += param.numel()
    for one in (variant("copy"), variant("intermediate_size", 20), variant("num_key_value_heads", 1)):
        made = build_student(parts, one)
        assert all(param.untyped_storage().nbytes() == param.nbytes for param in made.parameters())
        assert made(runs[one.learn]).isfinite().all()


def test_missing_scores_are_not_taken_for_truncation() -> None:
    parts, _ = first_layer(teacher("mixtral"))
    none = LayerImportance({}, {}, {})
    assert student(parts, variant("num_key_value_heads", 1), none)  # an average needs none
    for one in (
        variant("intermediate_size", 8),
        variant("experts", 3),
        variant("num_key_value_heads", 1, how="select"),
    ):
        with pytest.raises(ModelUnsupported, match="no importance was measured"):
            student(parts, one, none)


def test_settings_of_the_config_build_the_same_shapes() -> None:
    parts, _ = first_layer(teacher("llama"))
    fewer = Change(subblock="attention", kind="num_key_value_heads", count=2, how="average")
    narrow = Change(subblock="ffn", kind="intermediate_size", count=20)
    sizes = config_sizes(parts, Variant(learn="block", changes=(fewer, narrow)))
    assert sizes == {"num_key_value_heads": 2, "intermediate_size": 20}


def test_what_is_known_of_a_layer_holds_for_others_of_its_structure() -> None:
    found = [parts for parts, _, _ in layers(teacher("llama"))]
    first, second = (student(parts, variant("intermediate_size", 20)) for parts in found)
    as_first = student(found[0].of_layer(found[1].name, found[1].layer), variant("intermediate_size", 20))
    for name, tensor in second.layer_tensors().items():
        assert torch.equal(tensor, as_first.layer_tensors()[name])
    assert not torch.equal(first.layer_tensors()["mlp.up_proj.weight"], second.layer_tensors()["mlp.up_proj.weight"])


class _Config:
    def __init__(self) -> None:
        self.width, self.num_experts, self.hidden, self.widths = 24, 4, 32, [12, 24]


class _Expert(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.w1, self.w2 = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.relu(self.w1(x)))


class _Routed(nn.Module):
    """Experts in a list, all of which see every token."""

    def __init__(self, config: _Config):
        super().__init__()
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(_Expert(config.hidden, config.width) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


class _Layer(nn.Module):
    """Of a class without config in its modules: a width of its own in each layer, experts in the second."""

    def __init__(self, config: _Config, layer_number: int):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.ffn = _Routed(config) if layer_number else _Expert(config.hidden, config.widths[layer_number])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


def inspected(layer: nn.Module, config, index: int):
    call, hidden = LayerCall((), {}, 0), torch.randn(2, 5, 32, dtype=torch.float64)
    parts = inspect_layer(f"layers.{index}", layer, config, call, hidden)
    return parts, first_layer_of(layer, parts, {"block": SubBlockRun(hidden, call, hidden)})[1]


def test_a_width_of_single_layers_and_a_list_of_experts() -> None:
    torch.manual_seed(0)
    config = _Config()
    first, second = (_Layer(config, index).double() for index in range(2))
    parts, runs = inspected(first, config, 0)
    assert (parts.shape.intermediate_size, parts.shape.experts) == (12, None)
    narrow = student(parts, variant("intermediate_size", 5), LayerImportance({"ffn": -torch.arange(12.0)}, {}, {}))
    assert config_sizes(parts, variant("intermediate_size", 5)) == {"widths": [5, 24]} and config.widths == [12, 24]
    first.ffn.w2.weight.data[:, 5:] = 0
    require_close(narrow(runs["ffn"]), first_layer_of(first, parts, {"block": run_of(runs)})[1]["ffn"].target)

    parts, runs = inspected(second, config, 1)
    assert (parts.shape.intermediate_size, parts.shape.experts) == (24, 4)
    importance = LayerImportance({}, {}, {"ffn": torch.tensor([3.0, 1.0, 4.0, 2.0])})
    fewer, left = student(parts, variant("experts", 2), importance), [0, 2]
    x = second.norm(runs["ffn"].input)
    weights = (x @ second.ffn.router.weight[left].T).softmax(-1)
    expected = sum(second.ffn.experts[expert](x) * weights[..., i : i + 1] for i, expert in enumerate(left))
    require_close(fewer(runs["ffn"]), expected)
    assert torch.equal(fewer.layer_tensors()["ffn.experts.1.w1.weight"], second.ffn.experts[2].w1.weight)
    # The width of every expert, each by scores of its own.
    scores = {f"ffn.experts.{i}": torch.rand(24, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    narrow = student(parts, variant("intermediate_size", 7), LayerImportance(scores, {}, {}))
    for i, expert in enumerate(second.ffn.experts):
        expert.w2.weight.data[:, scores[f"ffn.experts.{i}"].argsort(descending=True)[7:]] = 0
    require_close(narrow(runs["ffn"]), first_layer_of(second, parts, {"block": run_of(runs)})[1]["ffn"].target)


def run_of(runs) -> SubBlockRun:
    """The sub-block is the first in its layer."""
    return SubBlockRun(runs["ffn"].input, LayerCall((), {}, 0), runs["ffn"].target)


def test_a_class_that_cannot_be_built_again_is_copied_and_skipped_alone() -> None:
    block = zoo.make("routed").layers[0].double()
    hidden, expert = torch.randn(2, 5, 32, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.int64)
    parts = inspect_layer("layers.0", block, None, LayerCall((), {"expert": expert}, 0), hidden)
    assert (parts.shape.intermediate_size, parts.shape.num_key_value_heads, parts.shape.experts) == (None,) * 3
