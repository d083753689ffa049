"""Model kinds and patterns of tests/kinds on CUDA, where backward runs in a thread of its own and copies run beside the
kernels: the same bits as plain torch.

Run with CUBLAS_WORKSPACE_CONFIG=:4096:8, as torch's deterministic mode asks for.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import cells
import foreign_plans
import pytest
import torch
import zoo
from kinds import test_families, test_passes, test_stacks, test_state
from torch import nn

import outsize
from outsize.base.errors import ModelUnsupported
from outsize.model.tensors import map_tensors

pytestmark = pytest.mark.gpu
STREAMED: dict[str, Any] = dict(weights="host", optimizer="host", depth=1)
FAMILIES = [
    "gemma2",
    "gemma3n",
    "gpt2",
    "mixtral",
    "zamba2",
    "albert",
    "modernbert",
    "t5",
    "whisper",
    "moonshine",
    "audio-spectrogram",
    "vit",
    "swin",
    "convnext",
    "resnet",
    "clip",
    "blip",
    "qwen2-vl",
    "idefics",
]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def on_gpu(batch: Any) -> Any:
    return map_tensors(lambda t: t.cuda(), batch)


def assert_equal_state(model: nn.Module, plain: nn.Module) -> None:
    expected = {name: value.cpu() for name, value in (*plain.named_parameters(), *plain.named_buffers())}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(value.cpu(), expected[name]), name


def assert_trains(
    make: Callable[[], nn.Module], data: list[Any], strategies: tuple[str, ...], *, is_dict: bool = False
) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        out = model(**batch)
        return out["loss"] if is_dict else out.loss

    plain = make().cuda()
    losses = test_families.run(plain, foreign_plans.reference(plain), loss, on_gpu(data))
    traced = None
    for strategy in strategies:
        model = make()
        if traced is None:
            traced = cells.Tracer(model, data[0], cells.find_layers(model), cells.choose_device("cuda")).trace()
        how: dict[str, Any] = dict(spec=foreign_plans.SPEC, device="cuda", traced=traced, strategy=strategy, **STREAMED)
        with cells.closing(cells.prepare_by_hand(model, data[0], **how)) as engine:
            assert test_families.run(model, engine.optimizer, loss, on_gpu(data)) == losses, strategy
        assert_equal_state(model, plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_kind(name: str) -> None:
    family = test_families.FAMILIES[name]
    assert_trains(family.make, family.data(3), ("recompute", "swap"))


@pytest.mark.parametrize(
    "forward", [test_passes.teacher_first, test_passes.pair, test_passes.plain_pass], ids=lambda f: f.__name__
)
def test_passes_in_one_forward(forward: Any) -> None:
    reentrant = False if forward is test_passes.plain_pass else None
    make = functools.partial(test_passes.Model, forward, reentrant)
    assert_trains(make, test_passes.DATA, ("keep", "recompute", "offload", "swap"), is_dict=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_layers_is_refused_by_name(reentrant: bool) -> None:
    forward = functools.partial(test_passes.AROUND_LAYERS[0], reentrant=reentrant)
    with pytest.raises(ModelUnsupported, match=r"encoder.layers.\d is called again in backward"):
        outsize.prepare(test_passes.Model(forward), test_passes.DATA[0], device="cuda", gpu_memory="4GiB")


def direct() -> nn.Module:
    return test_stacks.Direct(nn.ModuleList(test_stacks.blocks(4)))


@pytest.mark.parametrize("build", [test_stacks.Recorded, test_stacks.Hooked, direct])
def test_values_around_outputs_and_direct_calls(build: Any) -> None:
    assert_trains(
        functools.partial(test_stacks.made, build),
        test_stacks.DATA,
        ("keep", "recompute", "offload", "swap"),
        is_dict=True,
    )


@pytest.mark.parametrize("block", [test_state.Normed, test_state.Spectral], ids=lambda b: b.__name__)
def test_state_that_forwards_write(block: type[nn.Module]) -> None:
    assert_trains(
        functools.partial(test_state.Stack, block), test_state.DATA, ("keep", "recompute", "swap"), is_dict=True
    )


def test_unfreezing_and_a_mask_that_appears() -> None:
    """Both are planned for again in the middle of a run."""

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for step, batch in enumerate(on_gpu(cells.batches("llama-untied", 6))):
            if step == 2:
                model.model.layers[-1].requires_grad_(True)
            if step == 4:
                model.requires_grad_(True)
            if step == 5:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                batch["attention_mask"][0, -3:] = 0
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def make() -> nn.Module:
        model = zoo.make("llama-untied")
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        return model

    plain = make().cuda()
    reference = outsize.reference.AdamW(plain.parameters(), lr=1e-2)
    losses = loop(plain, reference)
    model = make()
    pins = outsize.Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0)
    engine = outsize.prepare(
        model,
        cells.batches("llama-untied", 1)[0],
        device="cuda",
        gpu_memory="4GiB",
        optimizer=outsize.AdamW(lr=1e-2),
        pins=pins,
        chunk_bytes="16KiB",
        chunked_loss=False,
    )
    assert loop(model, engine.optimizer) == losses
    engine.detach()
    assert_equal_state(model, plain)
