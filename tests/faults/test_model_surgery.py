"""What users do to a prepared model from outside: save, load, copy, move, read, rebind. Nothing may silently use a
slot's bytes.
"""

import copy
import pickle
from typing import Any

import cells
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported, StaleParameter
from outsize.runtime.engine import Engine

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)


def streamed(
    name: str = "llama", *, dtype: torch.dtype = torch.bfloat16, spec: outsize.AdamW = SPEC, **how: Any
) -> tuple[nn.Module, Engine]:
    model = zoo.make(name, dtype=dtype)
    return model, cells.prepare_by_hand(
        model, zoo.batch(name), spec=spec, **{"weights": "host", "optimizer": "host", **how}
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "llama", seed: int = 0) -> float:
    out = model(**zoo.batch(name, seed=seed))
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(out.loss.detach())


def losses_over(data: list[dict[str, torch.Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in data:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_state_dict_holds_the_weights_and_the_same_keys_as_before() -> None:
    """Traps A9, A25, H8: names untouched, values from home."""
    plain = zoo.make("llama", dtype=torch.bfloat16)
    model, engine = streamed()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    inner = model.model.layers[2].state_dict()
    assert torch.equal(inner["mlp.up_proj.weight"], plain.model.layers[2].mlp.up_proj.weight)
    engine.detach()


@pytest.mark.parametrize("homes", [("host", "host"), ("host", "gpu"), ("gpu", "host"), ("gpu", "gpu")])
def test_load_state_dict_reaches_the_homes(homes: tuple[str, str]) -> None:
    """Traps H1, C10: the next forward computes with what was loaded, and the masters' lower halves are reset."""
    other = zoo.make("llama", dtype=torch.bfloat16, seed=7)
    model, engine = streamed(weights=homes[0], optimizer=homes[1])
    step(model, engine.optimizer)
    model.load_state_dict(other.state_dict())
    batch = zoo.batch("llama", seed=3)
    assert float(model(**batch).loss) == float(other(**batch).loss)
    with pytest.raises(EngineMisuse, match="assign"):
        model.load_state_dict(other.state_dict(), assign=True)
    missing = model.load_state_dict({}, strict=False).missing_keys
    assert "model.embed_tokens.weight" in missing
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_save_pretrained_writes_what_from_pretrained_reads(tmp_path: Any) -> None:
    """Traps H2, H3: parameters of two blocks have one address in the slots and are not taken for tied."""
    from transformers import LlamaForCausalLM

    model, engine = streamed("llama-untied")
    step(model, engine.optimizer, "llama-untied")
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    engine.detach()


def test_copying_and_moving_are_refused_with_what_to_do_instead() -> None:
    model, engine = streamed()
    for act in (
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(model.model.layers[0]),
        lambda: pickle.dumps(model),
        lambda: model.to(torch.float32),
        lambda: model.model.half(),
        lambda: model.to("meta"),
    ):
        with pytest.raises(EngineMisuse, match="detach"):
            act()
    assert model.to("cpu") is model and model.model.layers[0].to(torch.bfloat16) is model.model.layers[0]
    step(model, engine.optimizer)
    engine.detach()
    copy.deepcopy(model)
    model.to(torch.float32)


def test_a_rebound_parameter_is_named() -> None:
    """Behind the engine's back; `p.data = value` itself is a write to the home (tests/foreign/test_weights.py)."""
    model, _ = streamed()
    with torch._C.DisableTorchFunctionSubclass():
        model.model.norm.weight.data = torch.ones(zoo.HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(EngineMisuse, match=r"model\.norm\.weight"):
        model(**zoo.batch("llama"))


@pytest.mark.parametrize("read", [lambda p: p.sum(), lambda p: p.detach().sum(), lambda p: torch._foreach_norm([p])])
def test_a_weight_read_in_another_layers_forward_raises_with_what_the_slot_holds(read: Any) -> None:
    """Trap A10: not another layer's finite numbers."""
    model, engine = streamed(depth=0)
    step(model, engine.optimizer)
    far = model.model.layers[3].mlp.up_proj.weight
    hook = model.model.layers[0].register_forward_hook(lambda *_: read(far))
    with pytest.raises(StaleParameter, match=r"layers\.3\.mlp\.up_proj\.weight.*its slot holds"):
        model(**zoo.batch("llama"))
    hook.remove()
    step(model, engine.optimizer)
    engine.detach()


def test_gathered_reads_and_writes_by_name() -> None:
    model, engine = streamed()
    name = "model.layers.3.mlp.up_proj.weight"
    with engine.gathered(name) as values:
        assert torch.equal(values[name], zoo.make("llama", dtype=torch.bfloat16).state_dict()[name])
        values[name].zero_()
    assert model.state_dict()[name].abs().sum() == 0
    with engine.gathered() as values:
        assert set(values) == {n for n, _ in model.named_parameters()}
    engine.detach()


class FusedLoss(nn.Module):
    """Reads the head's weight without calling the head, as fused losses do; and a parameter of its own parent (trap
    A12).
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.make("llama-untied")
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner.model(input_ids=input_ids).last_hidden_state
        logits = F.linear(hidden * self.scale, self.inner.lm_head.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_a_head_read_without_a_call_is_present() -> None:
    data = cells.batches("llama", 3)

    plain = FusedLoss()
    expected = losses_over(data, plain, cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1))
    model = FusedLoss()
    engine = cells.prepare_by_hand(model, data[0], spec=SPEC, weights="host", optimizer="host", strategy="recompute")
    assert losses_over(data, model, engine.optimizer) == expected
    engine.detach()


class _StashesWeight(torch.autograd.Function):
    """Keeps the weight on ctx, where no saved-tensor hook sees it (trap A11)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.x = weight, x
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad @ ctx.weight, (grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)).view_as(ctx.weight)


class _Stashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(_StashesWeight.apply(x, self.proj.weight))


class _Stack(nn.Module):
    def __init__(self, block: type[nn.Module], depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.out(x).square().mean()}


class _TransposedWeight(nn.Module):
    """A permuted, dense parameter (trap A2): its strides are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).t() * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


@pytest.mark.parametrize("block", [_Stashing, _TransposedWeight])
@pytest.mark.parametrize("strategy", ["keep", "recompute", "offload", "swap"])
def test_weights_on_ctx_and_permuted_weights_train_to_the_bit(block: type[nn.Module], strategy: str) -> None:
    data = [{"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(i))} for i in range(3)]

    plain = _Stack(block)
    expected = losses_over(data, plain, cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1))
    model = _Stack(block)
    engine = cells.prepare_by_hand(
        model, data[0], spec=SPEC, weights="host", optimizer="host", strategy=strategy, depth=0, chunk_bytes=128
    )
    assert losses_over(data, model, engine.optimizer) == expected
    assert model.layers[0].state_dict().keys() == plain.layers[0].state_dict().keys()
    engine.detach()
    assert all(
        torch.equal(a, b) and a.stride() == b.stride()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_lora_factors_in_fp32_under_autocast_train_to_the_bit() -> None:
    """Trap A13, and a frozen base: no optimizer state, no gradient traffic, bytes unchanged under weight decay (C2)."""
    from peft import LoraConfig, get_peft_model

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = get_peft_model(zoo.make("llama", dtype=torch.bfloat16), LoraConfig(r=4, target_modules="all-linear"))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1)
        return model.train()

    data = cells.batches("llama", 3)

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for batch in data:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(**batch)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(out.loss.detach()))
        return losses

    plain = make()
    expected = run(
        plain, cells.Reference([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    )
    model = make()
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    engine = cells.prepare_by_hand(model, data[0], spec=SPEC, weights="host", optimizer="host", strategy="recompute")
    assert run(model, engine.optimizer) == expected
    frozen = {c.index for c in engine.layout.chunks if not c.is_updated}
    everything = [a for segment in engine.runtime.executor.schedule.segments.values() for a in segment.actions]
    assert frozen and not any(a.kind in "GQUW" and a.index in frozen for a in everything)
    state = model.state_dict()
    assert all(torch.equal(state[n], v) for n, v in base.items())
    engine.detach()


def test_detach_gives_a_plain_model_that_trains_on_and_can_be_prepared_again() -> None:
    """Traps A5, H7."""
    plain = zoo.make("llama", dtype=torch.bfloat16)
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    model, engine = streamed()
    losses, expected = [], []
    for seed in range(3):
        expected.append(step(plain, reference, seed=seed))
        losses.append(step(model, engine.optimizer, seed=seed))
    saved = engine.detach()
    assert not any(hasattr(m, "_outsize") for m in model.modules()) and "forward" not in model.model.layers[0].__dict__
    mine = cells.Reference(model.parameters(), lr=1e-2, weight_decay=0.1)
    mine.load_state_dict(saved)
    expected.append(step(plain, reference, seed=3))
    losses.append(step(model, mine, seed=3))
    engine = cells.prepare_by_hand(
        model, zoo.batch("llama"), spec=SPEC, weights="host", optimizer="gpu", strategy="swap"
    )
    engine.optimizer.load_state_dict(mine.state_dict())
    expected.append(step(plain, reference, seed=4))
    losses.append(step(model, engine.optimizer, seed=4))
    assert losses == expected
    engine.detach()
    with pytest.raises(EngineMisuse, match="detached"):
        _ = engine.plan


def test_two_engines_share_the_device_or_the_second_is_refused() -> None:
    device = "sim:24MiB"
    first = outsize.prepare(
        zoo.make("llama"), zoo.batch("llama"), device=device, gpu_memory="16MiB", chunk_bytes="16KiB"
    )
    with pytest.raises(ConfigError, match="another engine"):
        outsize.prepare(zoo.make("gpt2"), zoo.batch("gpt2"), device=device, gpu_memory="16MiB", chunk_bytes="16KiB")
    second = outsize.prepare(zoo.make("gpt2"), zoo.batch("gpt2"), device=device, chunk_bytes="16KiB")
    assert second.plan.gpu_budget_bytes <= 8 * 2**20
    for seed in range(2):
        step(first.model, first.optimizer, seed=seed)
        step(second.model, second.optimizer, "gpt2", seed=seed)
    second.detach()
    first.detach()
    third = outsize.prepare(zoo.make("gpt2"), zoo.batch("gpt2"), device=device, chunk_bytes="16KiB")
    assert third.plan.gpu_budget_bytes == 24 * 2**20
    third.detach()


def test_a_model_on_meta_or_with_untrainable_dtypes_is_refused_by_name() -> None:
    with pytest.raises(ModelUnsupported, match="meta"):
        outsize.prepare(zoo.make("llama").to("meta"), zoo.batch("llama"), device="cpu")
    with pytest.raises(ModelUnsupported, match="float64"):
        outsize.prepare(zoo.make("llama").double(), zoo.batch("llama"), device="cpu")
    model = zoo.make("llama").half()
    engine = outsize.prepare(model, zoo.batch("llama"), device="cpu")
    assert next(model.parameters()).dtype == torch.float32
    engine.detach()


def test_an_unknown_block_path_is_answered_with_the_lists_there_are() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers"):
        outsize.prepare(zoo.make("llama"), zoo.batch("llama"), device="cpu", blocks=["model.blocks"])
    engine = outsize.prepare(zoo.make("llama"), zoo.batch("llama"), device="cpu", blocks=["model.layers"])
    assert [b.name for b in engine.graph.blocks] == ["stem", *(f"model.layers.{i}" for i in range(4)), "head"]
    engine.detach()


def test_user_gradient_checkpointing_and_caches_are_turned_off() -> None:
    """Traps A17, A18: one owner of recompute, no cache in training."""
    model = zoo.make("llama")
    model.config.use_cache = True
    model.gradient_checkpointing_enable()
    engine = outsize.prepare(model, zoo.batch("llama"), device="cpu")
    assert not model.is_gradient_checkpointing and model(**zoo.batch("llama")).past_key_values is None
    engine.detach()
    assert model.config.use_cache is True
