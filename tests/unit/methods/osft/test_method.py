"""Settings of OSFT: ranks, targets, and what trains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils.quantization_config import QuantizationMethod

import outsize
from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.methods.osft.targets import choose_trainable, find_targets
from outsize.model.weights import unmaterialized_like


def frozen_rank(small: int, module: str = "layers.0.q_proj", **settings) -> int:
    return outsize.OSFT(**settings).shape(module, small, 2 * small).frozen_rank


@pytest.mark.parametrize(
    ("small", "ratio", "free"),
    # Multiples of 64 that leave both kinds of directions; a weight without such a multiple has the nearest rank.
    [(4096, 0.5, 2048), (4096, 0.3, 1216), (5120, 0.9, 4608), (4096, 0.001, 64), (4096, 0.999, 4032), (100, 0.9, 64),
     (64, 0.3, 19), (64, 0.001, 1), (64, 0.999, 63), (1, 0.5, 1), (4096, 0, 0), (4096, 1, 4096), (64, 1.0, 64), (64, 0.0, 0)],
)  # fmt: skip
def test_free_ranks_of_drifts(small: int, ratio: float, free: int) -> None:
    """D31. 0 freezes a weight and 1 trains it normally."""
    assert small - frozen_rank(small, unfreeze_rank_ratio=ratio) == free


def test_effective_rank_is_the_frozen_rank() -> None:
    assert frozen_rank(4096, effective_rank=1024) == frozen_rank(4096, effective_rank=0.25) == 1024
    assert frozen_rank(4096, effective_rank=1000) == 1024
    assert frozen_rank(4096, effective_rank=0) == 0
    assert frozen_rank(4096, effective_rank=9999) == frozen_rank(4096, effective_rank=1.0) == 4096


@pytest.mark.parametrize(
    ("small", "ratio", "frozen"), [(5120, 0.9, 511), (2560, 0.8, 511), (4096, 0.3, 2867), (8, 0.01, 7)]
)
def test_ranks_of_mini_trainer_are_its_own(small: int, ratio: float, frozen: int) -> None:
    factors = {"parametrization": "factors", "variant": "mini_trainer"}
    assert frozen_rank(small, unfreeze_rank_ratio=ratio, **factors) == frozen


@pytest.mark.parametrize(("small", "rank", "frozen"), [(100, 0.33, 33), (100, 7, 7), (100, 200, 100), (101, 0.5, 50)])
def test_ranks_of_peft_are_its_own(small: int, rank: float, frozen: int) -> None:
    assert frozen_rank(small, effective_rank=rank, parametrization="factors", variant="peft") == frozen


def test_rank_pattern_replaces_the_rank_by_the_first_pattern_found() -> None:
    settings = {"unfreeze_rank_ratio": 0.5, "rank_pattern": {r"layers\.0\.": 0.25, "q_proj": 0.75}}
    assert 512 - frozen_rank(512, **settings) == 128
    assert 512 - frozen_rank(512, "layers.1.q_proj", **settings) == 384
    assert 512 - frozen_rank(512, "layers.1.k_proj", **settings) == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of unfreeze_rank_ratio and effective_rank is needed, and none is given"),
        ({"unfreeze_rank_ratio": None}, "none is given"),
        ({"unfreeze_rank_ratio": 0.5, "effective_rank": 8}, "both are given"),
        ({"unfreeze_rank_ratio": 1.5}, "unfreeze_rank_ratio is 1.5; it must be a number from 0 to 1"),
        ({"unfreeze_rank_ratio": True}, "it must be"),
        ({"effective_rank": 1.5}, "effective_rank is 1.5; it must be a count or a fraction"),
        ({"effective_rank": -1}, "it must be"),
        ({"unfreeze_rank_ratio": 0.5, "rank_pattern": {"q_proj": None}}, r"rank_pattern\['q_proj'\] is None"),
        ({"unfreeze_rank_ratio": 0.5, "rank_pattern": {"(": 0.5}}, "no regular expression"),
        ({"unfreeze_rank_ratio": 0.5, "parametrization": "core"}, "'drift' or 'factors'"),
        ({"unfreeze_rank_ratio": 0.5, "variant": "peft"}, "variant is 'peft' with parametrization='drift'"),
        ({"unfreeze_rank_ratio": 0.5, "parametrization": "factors"}, "variant is None"),
        ({"effective_rank": 8, "parametrization": "factors", "variant": "mini_trainer"}, "Set unfreeze_rank_ratio"),
        ({"unfreeze_rank_ratio": 0.5, "others": "some"}, "others is 'some'"),
        ({"unfreeze_rank_ratio": float("nan")}, "it must be a number from 0 to 1"),
        ({"unfreeze_rank_ratio": 0.5, "rank_pattern": ["q_proj"]}, "it must be a dict of patterns and ranks"),
        ({"unfreeze_rank_ratio": 0.5, "target_modules": [3]}, "it must be a list of names, or a string"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outsize.OSFT(**settings)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
        )
    )


HALF = outsize.OSFT(unfreeze_rank_ratio=0.5)


def test_targets_are_the_linear_weights_except_the_head() -> None:
    targets = find_targets(llama(), HALF)
    assert len(targets) == 14 and targets[0].name == "model.layers.0.self_attn.q_proj.weight"
    assert {(t.shape.rows, t.shape.columns, t.shape.rank) for t in targets} == {
        (32, 32, 16), (16, 32, 8), (48, 32, 16), (32, 48, 16),
    }  # fmt: skip
    assert not any(t.shape.is_transposed for t in targets)


def test_target_modules() -> None:
    def names(modules) -> list[str]:
        return [t.name for t in find_targets(llama(), replace(HALF, target_modules=modules))]

    assert names(["layers.1.self_attn.q_proj"]) == ["model.layers.1.self_attn.q_proj.weight"]
    assert len(names(["q_proj", "v_proj"])) == 4 and names(["lm_head"]) == ["lm_head.weight"]
    assert len(names(r".*\.layers\.0\..*_proj")) == 7
    for missing in (["proj"], "q_proj", []):
        with pytest.raises(ConfigError, match="no trainable linear weight that target_modules="):
            names(missing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # A misspelled name would leave its weights to train in all directions.
        ({"target_modules": ["q_proj", "kproj"]}, "target_modules names kproj, which is no linear module"),
        ({"target_modules": ["q_proj", "mlp"]}, "target_modules names mlp, .* can name all linear modules within"),
        ({"rank_pattern": {"q_proj": 0.1, "kproj": 0.1}}, "rank_pattern has 'kproj', which no module's name contains"),
        ({"target_modules": "q_proj"}, "A string is a regular expression for whole names"),
    ],
)
def test_names_that_match_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_targets(llama(), replace(HALF, **settings))


def test_a_model_in_ddp_is_refused(tmp_path: Path) -> None:
    """It averages gradients after they are taken."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ModelUnsupported, match="wrapped in DistributedDataParallel"):
            find_targets(nn.parallel.DistributedDataParallel(llama()), HALF)
    finally:
        torch.distributed.destroy_process_group()


def test_models_without_values_are_refused_by_a_plain_loop() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ModelUnsupported, match=r"embed_tokens\.weight has no values yet"):
        outsize.osft.AdamW(model, HALF)
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = unmaterialized_like(weight, torch.float32)
    with pytest.raises(ModelUnsupported, match=r"layers\.0\.mlp\.up_proj\.weight has no values yet"):
        outsize.osft.AdamW(model, HALF)


def test_weights_without_elements_are_no_targets() -> None:
    with pytest.warns(UserWarning):
        model = nn.Sequential(nn.Linear(8, 0), nn.Linear(8, 8))
    assert [target.name for target in find_targets(model, HALF)] == ["1.weight"]


def test_weights_of_conv1d_are_transposed() -> None:
    """D32."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16))
    targets = {t.name.removeprefix("transformer.h.0."): t.shape for t in find_targets(model, HALF)}
    assert {name: shape.is_mirrored for name, shape in targets.items()} == {
        "attn.c_attn.weight": False, "attn.c_proj.weight": True, "mlp.c_fc.weight": False, "mlp.c_proj.weight": True,
    }  # fmt: skip


@pytest.mark.parametrize("others", ["train", "freeze", "norms"])
def test_others(others: str) -> None:
    model = llama()
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    method = outsize.OSFT(
        unfreeze_rank_ratio=0.5, rank_pattern={r"layers\.1\.self_attn": 0, "gate_proj": 1}, others=others
    )
    targets = find_targets(model, method)
    choose_trainable(model, method, targets)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {t.name for t in targets if t.update == "frozen"}.isdisjoint(trained)
    assert {t.name for t in targets if t.update != "frozen"} <= trained
    assert [t.update for t in targets if "gate_proj" in t.name] == ["whole"] * 2
    assert {t.update for t in targets if "layers.1.self_attn" in t.name} == {"frozen"}
    rest = trained - {t.name for t in targets}
    assert "model.layers.0.input_layernorm.weight" not in rest, "nothing is unfrozen"
    assert len(rest) == {"train": 6, "freeze": 0, "norms": 4}[others]


def test_frozen_and_shared_weights() -> None:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    assert len(find_targets(model, HALF)) == 7
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[1].mlp.up_proj.weight
    assert len(find_targets(model, HALF)) == 6
    tied = nn.ModuleDict(
        {"table": nn.Embedding(50, 32), "head": nn.Linear(32, 50, bias=False), "other": nn.Linear(32, 32)}
    )
    tied["head"].weight = tied["table"].weight
    assert [t.name for t in find_targets(tied, HALF)] == ["other.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused_by_name(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.zeros(8, 8).to(dtype), requires_grad=False)
    do = "Convert the model" if dtype in (torch.float16, torch.float64) else "Use the unquantized model"
    with pytest.raises(ModelUnsupported, match=rf"OSFT: 1.weight is .*only bf16 and fp32.*{do}"):
        find_targets(model, HALF)


def test_adaptive_ranks_freeze_more_of_layers_that_change_less() -> None:
    model, tokens = llama(), torch.arange(12).view(2, 6)
    for parameter, factor in (
        (model.model.layers[0].mlp.down_proj.weight, 50.0),
        (model.model.layers[1].mlp.down_proj.weight, 0.0),
    ):
        parameter.data.mul_(factor)
    model.train()
    pattern = outsize.osft.adaptive_ranks(model, {"input_ids": tokens}, 0.4)
    first, second = pattern.values()
    assert model.training and (first + second) / 2 == pytest.approx(0.4, abs=1e-6) and first > 0.45
    method = outsize.OSFT(unfreeze_rank_ratio=0.4, rank_pattern=pattern)
    ranks = {t.name: t.shape.rank for t in find_targets(model, method)}
    assert (
        ranks["model.layers.0.self_attn.q_proj.weight"]
        == round(32 * first)
        > ranks["model.layers.1.self_attn.q_proj.weight"]
    )
    with pytest.raises(ConfigError, match=r"the mean frozen share is 0\.05"):
        outsize.osft.adaptive_ranks(model, {"input_ids": tokens}, 0.95)


def test_quantized_models_whose_weights_are_not_in_linear_modules_are_refused() -> None:
    """As from_pretrained marks them; GPTQ's and HQQ's modules are no nn.Linear."""
    model = llama()
    model.is_quantized, model.quantization_method = True, QuantizationMethod.GPTQ
    with pytest.raises(ModelUnsupported, match=r"OSFT: the model is quantized \(gptq\)"):
        find_targets(model, HALF)


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module], num_run: int) -> None:
        super().__init__()
        self.layers, self.num_run = nn.ModuleList(layers), num_run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.num_run]:
            x = layer(x)
        return x


def test_layers_that_cannot_be_compared_are_refused_by_adaptive_ranks() -> None:
    x, square = torch.ones(2, 8), nn.Linear(8, 8, bias=False)
    for layers, num_run, message in (
        ([square, nn.Linear(8, 4)], 2, "output of layers.1 has another shape"),
        ([square, nn.Linear(8, 8)], 1, r"layers\.1 did not run on this batch"),
        ([nn.Sequential(nn.Identity(), Negated())] * 2, 2, "mean similarity .* is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            outsize.osft.adaptive_ranks(Layers(layers, num_run), {"x": x}, 0.5)


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class Wrapped(Tensor):
    """Keeps its values in another tensor, in a dtype that it does not show, as quantized weights do."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: args[0])


def test_tensors_that_wrap_others_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(Wrapped(torch.zeros(8, 8)), requires_grad=False)
    with pytest.raises(
        ModelUnsupported, match=r"OSFT: 0\.weight is a Wrapped, which keeps its values in other tensors"
    ):
        find_targets(model, HALF)


def test_experts_that_train_in_all_directions_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 8), "experts": nn.ParameterList([torch.randn(4, 8, 8)])})
    for others in ("train", "freeze"):
        caplog.clear()
        method = outsize.OSFT(unfreeze_rank_ratio=0.5, others=others)
        choose_trainable(model, method, find_targets(model, method))
        assert ("experts.0 and 0 more weights of three dimensions" in caplog.text) == (others == "train")
