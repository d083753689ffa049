"""methods/bypass/hidden_size.py against models of transformers with a smaller config, whose weights are sliced by hand."""

import math
from typing import Any

import pytest
import torch
import transformers
from pruning import require_close, teacher
from torch import Tensor, nn

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.methods.bypass.hidden_size import Channels, Reduction, find_reduction, reduced_model
from outsize.methods.bypass.norm_statistics import NormStatistics

COUNT = 24
IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
VALID = torch.arange(12) < torch.tensor([[12], [7]])
COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "gate.weight")
ROWS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias")


def made(kind: str, *, tied: bool = False) -> Any:
    model: Any = teacher(kind)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    with torch.no_grad():  # channels of different sizes
        model.model.embed_tokens.weight.mul_(torch.linspace(0.2, 3, 32, dtype=torch.float64)[torch.randperm(32)])
    return model


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith(("layernorm", "model.norm"))}


@torch.no_grad()
def seen(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and outputs of the norms, of valid tokens."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, args, output, name=name: found.__setitem__(name, (args[0][VALID], output[VALID]))
        )
        for name, module in norms_of(model).items()
    ]
    model(input_ids=IDS, attention_mask=VALID.long(), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def ranked(model: Any) -> tuple[Reduction, Channels, nn.Module]:
    reduced = reduced_model(model, COUNT)
    reduction = find_reduction(model, reduced)
    statistics = NormStatistics({path: model.get_submodule(path) for path in reduction.norms})
    with statistics.listening(VALID):
        model(input_ids=IDS, attention_mask=VALID.long(), use_cache=False)
    return reduction, Channels.ranked(statistics.tensors(), COUNT), reduced


def by_hand(model: Any) -> tuple[Tensor, dict[str, float]]:
    scores, scales = torch.zeros(32, dtype=torch.float64), {}
    found = seen(model)
    for _, output in found.values():
        scores += output.abs().mean(0)
    keep = torch.tensor(sorted(sorted(range(32), key=lambda channel: -float(scores[channel]))[:COUNT]))
    for name, (given, _) in found.items():
        scales[name] = math.sqrt(float(given[:, keep].square().mean() / given.square().mean()))
    return keep, scales


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_channels_are_those_with_the_largest_outputs_of_all_norms(kind: str) -> None:
    model = made(kind)
    _, channels, _ = ranked(model)
    keep, scales = by_hand(model)
    assert torch.equal(channels.keep, keep) and not torch.equal(keep, torch.arange(COUNT))
    assert channels.scales.keys() == scales.keys() and len(scales) == 5
    assert all(math.isclose(channels.scales[name], scale, rel_tol=1e-12) for name, scale in scales.items())
    assert min(scales.values()) > 1.01  # large channels are kept


@torch.no_grad()
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen3", False), ("mixtral", False)])
def test_a_reduced_model_is_the_class_with_sliced_weights(kind: str, tied: bool) -> None:
    """The other model: another config by hand, and each tensor sliced by what its name says."""
    model = made(kind, tied=tied)
    reduction, channels, reduced = ranked(model)
    cut = {name: reduction.cut(name, param, channels) for name, param in model.named_parameters()}
    for name, param in reduced.named_parameters():
        assert param.shape == cut[name].shape and param.dtype == torch.float64, name
        param.data = cut[name]
    keep, scales = by_hand(model)
    values = {**model.config.to_dict(), "hidden_size": COUNT, "head_dim": 8, "tie_word_embeddings": tied}
    plain = type(model)._from_config(type(model.config)(**values), dtype=torch.float64).eval()
    if hasattr(plain, "set_experts_implementation"):
        plain.set_experts_implementation("eager")
        reduced.set_experts_implementation("eager")  # type: ignore[operator]
    own = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        value, owner = own[name], name.removesuffix(".weight")
        if name.endswith(("embed_tokens.weight", "lm_head.weight", *COLUMNS)):
            value = value[:, keep]
        elif name.endswith(ROWS):
            value = value[keep]
        elif name.endswith("experts.gate_up_proj"):
            value = value[:, :, keep]
        elif name.endswith("experts.down_proj"):
            value = value[:, keep]
        elif owner in scales:
            value = value[keep] * scales[owner]
        param.data = value.clone()
    for one in (reduced, plain):
        one.tie_weights()  # type: ignore[operator]
    assert (reduced.lm_head.weight is reduced.model.embed_tokens.weight) == tied  # type: ignore[union-attr]
    logits, expected = (one(input_ids=IDS, use_cache=False).logits for one in (reduced, plain))
    require_close(logits, expected, 1e-12)
    assert not torch.allclose(expected, model(input_ids=IDS, use_cache=False).logits, rtol=0.1)


@torch.no_grad()
def test_kept_channels_keep_their_size_after_a_norm() -> None:
    """Also of norms that multiply with 1 + weight."""
    torch.manual_seed(0)
    hidden = torch.randn(50, 32, dtype=torch.float64) * torch.linspace(0.1, 4, 32, dtype=torch.float64)
    keep = torch.arange(32 - COUNT, 32)
    scale = float((hidden[:, keep].square().mean() / hidden.square().mean()).sqrt())
    for form, kind in (("weight", "llama"), ("one_plus_weight", "gemma2")):
        model: Any = teacher(kind)
        reduced: Any = reduced_model(model, COUNT)
        reduction = find_reduction(model, reduced)
        assert set(reduction.norms.values()) == {form}
        whole, few = (one.model.layers[0].input_layernorm for one in (model, reduced))
        name = "model.layers.0.input_layernorm"
        channels = Channels(keep, {name: scale})
        few.weight.data = reduction.cut(f"{name}.weight", whole.weight, channels)
        sizes = [few(hidden[:, keep]).abs().mean(), whole(hidden)[:, keep].abs().mean()]
        assert math.isclose(*map(float, sizes), rel_tol=0.02)


@pytest.mark.parametrize(
    ("kind", "named"), [("gpt2", "c_attn"), ("falcon", "query_key_value"), ("starcoder2", "LayerNorm is no RMS norm")]
)
def test_classes_without_residual_channels_of_their_own_are_refused(kind: str, named: str) -> None:
    model = teacher(kind)
    with pytest.raises((ModelUnsupported, ConfigError), match=named):
        find_reduction(model, reduced_model(model, 16))


@pytest.mark.parametrize(("count", "named"), [(32, "not below the teacher's 32"), (18, "multiple of 8")])
def test_sizes_that_the_config_refuses(count: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        reduced_model(teacher("llama"), count)


def test_a_model_of_images_is_refused() -> None:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=97
        ),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
        ),
    )
    with pytest.raises(ModelUnsupported, match="vision or audio tower"):
        reduced_model(transformers.LlavaForConditionalGeneration(config), 16)


def test_a_norm_that_never_ran_is_named() -> None:
    with pytest.raises(ModelUnsupported, match=r"a\.norm"):
        NormStatistics({"a.norm": nn.RMSNorm(4)}).tensors()
