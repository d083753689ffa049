"""The zoo itself: every kind trains, and is the odd animal it claims to be."""

import pytest
import torch
import zoo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_kind_has_a_finite_loss_and_finite_gradients(name: str, dtype: torch.dtype) -> None:
    model = zoo.make(name, dtype)
    loss = model(**zoo.batch(name)).loss
    loss.backward()
    assert model.training and torch.isfinite(loss)
    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is None) == parameter_name.startswith(zoo.KINDS[name].idle or ("none",)), parameter_name
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), parameter_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_weights_have_the_dtype_that_was_requested_but_for_the_mixed_kind(name: str, dtype: torch.dtype) -> None:
    found = {parameter.dtype for parameter in zoo.make(name, dtype).parameters()}
    assert found == ({torch.float32, torch.bfloat16} if name == "mixed" else {dtype})


@pytest.mark.parametrize("name", zoo.NAMES)
def test_equal_arguments_give_equal_bits_and_another_seed_does_not(name: str) -> None:
    first, again, other = (
        zoo.make(name, seed=3).state_dict(),
        zoo.make(name, seed=3).state_dict(),
        zoo.make(name, seed=4).state_dict(),
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(torch.equal(value, zoo.batch(name)[key]) for key, value in zoo.batch(name).items())
    assert not torch.equal(zoo.batch(name)["input_ids"], zoo.batch(name, seed=1)["input_ids"])


def test_making_a_model_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    zoo.make("gpt2")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", [name for name in zoo.NAMES if name not in ("bert", "llama-classes", "modernbert")])
def test_tying_can_be_chosen(name: str) -> None:
    num_params = {tied: sum(p.numel() for p in zoo.make(name, tied=tied).parameters()) for tied in (True, False)}
    assert num_params[False] - num_params[True] == zoo.VOCAB * zoo.HIDDEN
    default = sum(p.numel() for p in zoo.make(name).parameters())
    assert default == num_params[zoo.KINDS[name].tied]


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_kinds_with_dropout_depend_on_the_seed_of_the_pass(name: str) -> None:
    model, batch = zoo.make(name), zoo.batch(name)
    torch.manual_seed(1)
    first = model(**batch).loss
    assert first != model(**batch).loss
    torch.manual_seed(1)
    assert first == model(**batch).loss


def test_soft_capping_and_the_sliding_window_of_gemma_change_its_loss() -> None:
    batch = zoo.batch("gemma2")
    losses = []
    for change in (
        {},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"layer_types": ["full_attention"] * 4},
    ):
        model = zoo.make("gemma2")
        for parameter in model.parameters():
            parameter.data.mul_(4)  # fresh weights are so small that attention is nearly flat and no cap bends anything
        for key, value in change.items():
            setattr(model.config, key, value)
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.attn_logit_softcapping = model.config.attn_logit_softcapping
            if "layer_types" in change:
                layer.attention_type, layer.self_attn.sliding_window = change["layer_types"][i], None
        losses.append(model(**batch).loss.item())
    assert len(set(losses)) == 4, losses


def test_the_looped_kind_runs_its_one_block_three_times() -> None:
    model, runs = zoo.make("looped"), []
    model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    model(**zoo.batch("looped"))
    assert len(model.layers) == 1 and len(runs) == 3


def test_all_experts_of_mixtral_are_used_by_the_default_batch() -> None:
    model = zoo.make("mixtral")
    model(**zoo.batch("mixtral")).loss.backward()
    for layer in model.model.layers:
        assert (layer.mlp.experts.down_proj.grad.flatten(1).abs().amax(dim=1) > 0).all()


def test_which_experts_of_the_routed_kind_get_a_gradient_depends_on_the_batch() -> None:
    model = zoo.make("routed")
    for low, high in ((3, 24), (25, 96)):
        model.zero_grad()
        tokens = torch.arange(low, high)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        expected = [low * 4 // zoo.VOCAB <= i <= (high - 1) * 4 // zoo.VOCAB for i in range(4)]
        for layer in model.layers:
            assert [expert.weight.grad is not None for expert in layer.experts] == expected


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "llava", "llava-next"])
def test_the_loss_of_kinds_with_images_depends_on_them(name: str) -> None:
    model, batch = zoo.make(name), zoo.batch(name)
    assert model(**batch).loss != model(**{**batch, "pixel_values": batch["pixel_values"] * 2}).loss


def test_layers_of_hybrid_kinds_differ() -> None:
    kinds = [{type(child).__name__ for child in layer.children()} for layer in zoo.make("qwen3-next").model.layers]
    assert kinds[0] != kinds[1] != kinds[2] != kinds[0]
    assert len({layer.attention_type for layer in zoo.make("modernbert").model.layers}) == 2


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_with_a_third_frozen_the_rest_still_gets_gradients(name: str, seed: int) -> None:
    model = zoo.make(name)
    frozen = zoo.freeze_some(model, seed)
    names = [parameter_name for parameter_name, _ in model.named_parameters()]
    assert frozen == tuple(n for n, p in model.named_parameters() if not p.requires_grad)
    assert 0.2 < len(frozen) / len(names) < 0.4
    model(**zoo.batch(name)).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (
            parameter_name in frozen or parameter_name.startswith(zoo.KINDS[name].idle or ("none",))
        ), parameter_name


def test_freezing_is_the_same_for_the_same_seed_and_odd_seeds_freeze_the_embedding() -> None:
    assert zoo.freeze_some(zoo.make("llama"), 2) == zoo.freeze_some(zoo.make("llama"), 2)
    assert zoo.freeze_some(zoo.make("llama"), 2) != zoo.freeze_some(zoo.make("llama"), 4)
    assert "model.embed_tokens.weight" in zoo.freeze_some(zoo.make("llama"), 1)
