"""`outsize.hidden_states_offload` on models of transformers: the bits of their own gradient checkpointing, reentrant and
not, with autocast; and on layers that FSDP2 shards.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn
from turns import by_turns

import outsize

KINDS = {"llama": 1, "qwen3": 1, "gemma2": 1, "gpt2": 1, "mixtral": 1, "t5": 3, "bert": 1, "qwen2.5-vl": 4}
"""With the number of layers whose input is offloaded: all but three. With dropout: GPT-2, T5, BERT."""


REENTRANT_DIFFERS = {("t5", False), ("t5", True), ("bert", True)}
"""Where torch's two forms of checkpointing themselves differ: in the order in which gradients of a tensor that all layers
share, or of autocast's copies of weights, are summed."""


def step(model: nn.Module, batch: dict[str, Tensor], autocast: bool) -> list[Tensor]:
    """Loss, gradients, and random numbers after forward and backward."""
    torch.manual_seed(7)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    after_forward = torch.rand(2)
    loss.backward()
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return [loss.detach(), *grads, after_forward, torch.rand(2)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("kind", "autocast"), by_turns(KINDS, [False, True]))
def test_the_bits_are_those_of_gradient_checkpointing_d37(kind: str, autocast: bool) -> None:
    """Traps D37, D48."""
    model, batch = zoo.make(kind), zoo.batch(kind)
    found = {}
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant and hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
        found[reentrant] = step(model, batch, autocast)
    assert same(found[False], found[True]) == ((kind, autocast) not in REENTRANT_DIFFERS)
    model.gradient_checkpointing_disable()
    for given in ({}, {"save_attention": kind in ("llama", "qwen3", "mixtral")}):
        with outsize.hidden_states_offload(model, **given) as offload:
            for _ in range(2):
                assert same(step(model, batch, autocast), found[False])
            more = 2 if given.get("save_attention") else 0  # only the last layer stays on the device
            assert offload.num_sent == 2 * (KINDS[kind] + more) and offload.used_bytes == 0
    assert not model.is_gradient_checkpointing


def test_gradient_checkpointing_is_as_before_afterwards() -> None:
    model, batch = zoo.make("llama"), zoo.batch("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    expected = step(model, batch, False)
    with outsize.hidden_states_offload(model):
        assert not model.is_gradient_checkpointing and same(step(model, batch, False), expected)
    assert model.is_gradient_checkpointing
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert same(step(model, batch, False), expected)


def test_generation_and_saving_work_while_it_is_enabled(tmp_path: Path) -> None:
    """Forwards without grad run as before, with their cache."""
    model, batch = zoo.make("llama").eval(), zoo.batch("llama")
    expected = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    with outsize.hidden_states_offload(model):
        assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), expected)
        model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("enabled_first", [False, True])
def test_layers_that_fsdp2_shards(mesh: torch.distributed.device_mesh.DeviceMesh, enabled_first: bool) -> None:
    """Their weights are gathered for the forward and again for the recomputation."""
    from torch.distributed.fsdp import fully_shard

    batch = zoo.batch("llama")
    expected = step(zoo.make("llama", tied=False), batch, False)
    model = zoo.make("llama", tied=False)
    offload = outsize.enable_hidden_states_offload(model) if enabled_first else None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    offload = offload or outsize.enable_hidden_states_offload(model)
    for _ in range(2):
        found = step(model, batch, False)
        found = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in found]
        assert same(found, expected)
    assert offload.num_sent == 2
    offload.disable()
