"""Discovery: the layers of every kind of model, read off the module tree; and which of them do the same work."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import nn

from outsize.base.errors import ConfigError
from outsize.model.discover import find_layers


def names(model: nn.Module, paths: list[str] | None = None) -> list[str]:
    return [layer.name for layer in find_layers(model, paths)]


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{i}" for i in range(count)]


EXPECTED = {
    "llama": numbered("model.layers", 4),
    "qwen3": numbered("model.layers", 4),
    "gemma2": numbered("model.layers", 4),
    "gpt2": numbered("transformer.h", 4),
    "mixtral": numbered("model.layers", 4),
    "t5": numbered("encoder.block", 3) + numbered("decoder.block", 3),
    "bert": numbered("bert.encoder.layer", 4),
    "plain": numbered("layers", 4),
    "looped": numbered("layers", 1),
    "one-block": numbered("model.layers", 1),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_layers_of_every_kind_are_found(kind: str) -> None:
    """Trap C15: T5 has two stacks, and lists inside its layers."""
    model = zoo.make(kind)
    layers = find_layers(model)
    assert [layer.name for layer in layers] == EXPECTED[kind]
    assert all(model.get_submodule(layer.name) is layer.module for layer in layers)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config)


def test_both_stacks_of_bart_are_found() -> None:
    """Trap C15: the decoder is not dropped."""
    layers = find_layers(bart())
    assert [layer.name for layer in layers] == numbered("model.encoder.layers", 2) + numbered("model.decoder.layers", 3)
    assert [layer.is_last for layer in layers] == [False, True, False, False, True]
    assert len({layer.structure for layer in layers}) == 2


def test_the_layers_of_a_peft_model_are_those_of_its_base() -> None:
    """Trap C15: two more segments in the path, and adapters inside the layers."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(zoo.make("llama"), LoraConfig(r=2, target_modules="all-linear"))
    layers = find_layers(model)
    assert [layer.name for layer in layers] == numbered("base_model.model.model.layers", 4)
    assert len({layer.structure for layer in layers}) == 1
    assert any("lora_A" in name for name, _ in layers[0].module.named_parameters())


# --- toys


class Toy(nn.Module):
    """`h`: a list of blocks, whatever the blocks are."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.h = nn.ModuleList(blocks)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.deep = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_list_inside_a_layer_belongs_to_the_layer() -> None:
    assert names(Toy(Experts(), Experts())) == ["h.0", "h.1"]


def test_of_twelve_blocks_the_second_is_not_taken_for_the_eleventh() -> None:
    """Trap C14: `h.1` is not the beginning of `h.10`."""
    model = Toy(*(nn.Linear(2, 2, bias=i == 10) for i in range(12)))
    layers = find_layers(model)
    assert [layer.name for layer in layers] == numbered("h", 12)
    assert len({id(layer.module) for layer in layers}) == 12 and all(
        layer.module is model.h[i] for i, layer in enumerate(layers)
    )
    assert [i for i, layer in enumerate(layers) if layer.structure != layers[1].structure] == [10]


def test_lists_are_found_at_any_depth_and_in_the_order_of_the_tree() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Sequential(Toy(nn.Linear(2, 2)))
            self.text = Toy(nn.Linear(2, 2), nn.Linear(2, 2))

    assert names(Towers()) == ["vision.0.h.0", "text.h.0", "text.h.1"]


def test_a_model_without_lists_has_no_layers() -> None:
    assert find_layers(nn.Linear(2, 2)) == ()
    assert find_layers(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))) == ()
    assert find_layers(Toy()) == () and find_layers(Toy(nn.ReLU(), nn.GELU())) == (), (
        "a list without parameters is no stack"
    )


# --- equal work


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral", "bert", "plain"])
def test_layers_that_differ_in_their_number_alone_do_the_same_work(kind: str) -> None:
    """`layer_idx` counts the layers and is not part of what they do."""
    layers = find_layers(zoo.make(kind))
    assert len({layer.structure for layer in layers}) == 1


def test_gemma_alternates() -> None:
    layers = find_layers(zoo.make("gemma2"))
    sliding, full = layers[0].structure, layers[1].structure
    assert sliding != full and [layer.structure for layer in layers] == [sliding, full, sliding, full]
    assert [layer.is_last for layer in layers] == [False, False, False, True]


def test_the_first_layer_of_t5_has_a_position_table_and_is_of_another_kind() -> None:
    layers = find_layers(zoo.make("t5"))
    structures = [layer.structure for layer in layers]
    assert structures[1] == structures[2] != structures[0] and structures[4] == structures[5] != structures[3]
    assert structures[1] != structures[4], "a decoder layer has cross attention"


def structure_after(change: Any) -> str:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
    change(block)
    return find_layers(Toy(block))[0].structure


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b[0].weight.requires_grad_(False),
        lambda b: b.to(torch.bfloat16),
        lambda b: setattr(b[1], "p", 0.2),
        lambda b: b.__setitem__(1, nn.ReLU()),
        lambda b: b.__setitem__(0, nn.Linear(4, 4, bias=False)),
        lambda b: b[0].register_buffer("table", torch.ones(3)),
        lambda b: setattr(b[0], "layer_idx", 5),
        lambda b: setattr(b[0], "kind", "sliding"),
        lambda b: setattr(b[0], "sizes", (1, 2)),
        lambda b: setattr(b[0], "scale", None),
    ],
    ids=["frozen", "dtype", "setting", "class", "shape", "buffer", "number", "text", "tuple", "none"],
)
def test_whatever_may_change_the_work_changes_the_structure(change: Any) -> None:
    assert structure_after(change) != structure_after(lambda b: None)


def test_weights_themselves_and_the_mode_do_not_enter() -> None:
    assert structure_after(lambda b: b[0].weight.data.zero_()) == structure_after(lambda b: None)
    assert structure_after(lambda b: b.eval()) == structure_after(lambda b: None)


def test_a_number_that_counts_by_another_step_is_not_a_layer_number() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    for i, block in enumerate(blocks):
        block.width = 2 * i
    assert len({layer.structure for layer in find_layers(Toy(*blocks))}) == 3
    for i, block in enumerate(blocks):
        block.width = 7 + i
    assert len({layer.structure for layer in find_layers(Toy(*blocks))}) == 1, "an offset does not matter"


# --- named lists


def test_named_lists_replace_discovery() -> None:
    model = Toy(Experts(), Experts())
    assert names(model, ["h.1.experts"]) == numbered("h.1.experts", 3)
    assert names(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), ["0"]) == ["0.0", "0.1"], (
        "a Sequential may be named"
    )
    t5 = zoo.make("t5")
    assert names(t5, ["decoder.block", "encoder.block"]) == numbered("decoder.block", 3) + numbered("encoder.block", 3)


def test_overlapping_lists_are_refused_with_both_names() -> None:
    """Trap C22."""
    model = Toy(Experts(), Experts())
    with pytest.raises(ConfigError, match=r"h\.0\.experts\.0 shares a module with h\.0"):
        find_layers(model, ["h", "h.0.experts"])
    with pytest.raises(ConfigError, match=r"h\.0 shares a module with h\.0\.experts\.0"):
        find_layers(model, ["h.0.experts", "h"])


def test_a_module_that_is_in_lists_several_times_is_one_layer() -> None:
    """Trap C22: two names for one module would be two plans for one set of weights."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert names(Toy(one, two, one)) == ["h.0", "h.1"]
    model = Toy(one, two)
    model.other = nn.ModuleList([two, nn.Linear(2, 2)])
    assert names(model) == names(model, ["h", "other"]) == ["h.0", "h.1", "other.1"]


class Borrows(nn.Module):
    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.own, self.lent = nn.Linear(2, 2), lent


def test_layers_may_share_a_module() -> None:
    """VeRA's projections are in every layer. What sharing means for gradients is found when the model runs
    (profile/sharing.py).
    """
    layers = find_layers(Toy(*(Borrows(lent) for lent in [nn.Linear(2, 2).requires_grad_(False)] * 4)))
    assert [layer.name for layer in layers] == numbered("h", 4)
    assert len({layer.structure for layer in layers}) == 1


def test_a_list_that_is_named_twice_is_refused() -> None:
    """Trap C22."""
    with pytest.raises(ConfigError):
        find_layers(Toy(nn.Linear(2, 2)), ["h", "h"])


def test_a_path_that_is_no_list_is_refused_with_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"'h\.0' is a Linear"):
        find_layers(Toy(nn.Linear(2, 2)), ["h.0"])
    with pytest.raises(ConfigError, match=r"has no 'layers'.*Choose among h"):
        find_layers(Toy(nn.Linear(2, 2)), ["layers"])


def test_an_empty_list_by_name_has_no_layers_or_is_refused_in_words() -> None:
    with contextlib.suppress(ConfigError):
        assert find_layers(nn.Sequential(nn.Sequential()), ["0"]) == ()
