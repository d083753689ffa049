"""Traps of the public systems that no other file covers; each test names its id. The sheet is
docs/decisions/0005-traps.md.
"""

import gc
import weakref
from typing import Any

import cells
import pytest
import torch
import zoo

import outsize
from outsize.base.errors import EngineMisuse, UpdateFailed
from outsize.runtime.updates import Updates

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)


def test_activations_that_do_not_fit_their_arena_are_an_error_that_names_the_block() -> None:
    """Trap A21: never kept on the device with a log line. Forced by a hook that makes the layer save more than in the
    profiling run.
    """
    model = zoo.make("gemma2")
    engine = cells.prepare_by_hand(model, zoo.batch("gemma2", size=2, tokens=16), spec=SPEC, strategy="swap")
    before = model.state_dict()
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out * out.sigmoid() * out.tanh() * out.cos()
    )
    with pytest.raises(EngineMisuse, match=r"model\.layers\.0: it saved .* at most"):
        model(**zoo.batch("gemma2", size=2, tokens=16))
    hook.remove()
    model(**zoo.batch("gemma2", size=2, tokens=16)).loss.backward()
    engine.optimizer.step()
    assert before.keys() == model.state_dict().keys()
    engine.detach()


@pytest.mark.parametrize("homes", [("host", "host"), ("host", "gpu"), ("gpu", "host"), ("gpu", "gpu")])
def test_whatever_reads_state_right_after_step_sees_the_step(homes: tuple[str, str], tmp_path: Any) -> None:
    """Traps B8, B12: state_dict, save_pretrained, gathered, optimizer state, evaluation."""
    plain = zoo.make("llama", dtype=torch.bfloat16)
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    model = zoo.make("llama", dtype=torch.bfloat16)
    engine = cells.prepare_by_hand(
        model, zoo.batch("llama"), spec=SPEC, device="sim:64MiB", weights=homes[0], optimizer=homes[1]
    )
    readers = [
        lambda m, o: m.state_dict()["model.layers.2.mlp.up_proj.weight"].float().sum(),
        lambda m, o: o.state_dict()["state"][3]["exp_avg"].sum(),
        lambda m, o: _loss(m),
    ]
    for seed, read in enumerate(readers):
        values = []
        for m, o in ((plain, reference), (model, engine.optimizer)):
            m(**zoo.batch("llama", seed=seed)).loss.backward()
            o.step()
            values.append(float(read(m, o)))
            o.zero_grad()
        assert values[0] == values[1]
    with engine.gathered() as gathered:
        assert all(torch.equal(gathered[n], p) for n, p in plain.named_parameters())
    engine.detach()


def _loss(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**zoo.batch("llama", seed=11)).loss


def test_skipped_steps_keep_nothing_alive(caplog: pytest.LogCaptureFixture) -> None:
    """Trap B14: a logged error must not hold frames and their tensors."""
    spec = outsize.AdamW(lr=1e-2, nonfinite="skip")
    model = zoo.make("llama")
    engine = cells.prepare_by_hand(model, zoo.batch("llama"), spec=spec)
    seen = []
    for seed in range(3):
        out = model(**zoo.batch("llama", seed=seed))
        (out.loss * float("inf")).backward()
        seen.append(weakref.ref(out.logits.untyped_storage()))
        del out
        engine.optimizer.step()
    gc.collect()
    assert engine.num_skipped == 3 and len(caplog.records) == 3
    assert all(ref() is None for ref in seen)
    assert all(isinstance(arg, (int, str)) for record in caplog.records for arg in record.args or ())
    engine.detach()


def test_an_update_that_fails_names_its_chunk() -> None:
    """Training cannot go on after it, and says so with the parameters concerned."""
    model = zoo.make("llama")
    engine = cells.prepare_by_hand(model, zoo.batch("llama"), spec=SPEC, weights="host", optimizer="host")
    engine.runtime.updates.__class__ = _Failing
    model(**zoo.batch("llama")).loss.backward()
    with pytest.raises(UpdateFailed, match=r"embed_tokens.*disk on fire"):
        engine.optimizer.step()


class _Failing(Updates):
    def update_chunk(self, index: int, step: Any) -> None:
        raise OSError("disk on fire")


def test_a_model_without_layers_trains_resident() -> None:
    torch.manual_seed(0)
    plain, model = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()),
    )
    model.load_state_dict(plain.state_dict())
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    x = torch.randn(4, 8)
    engine = outsize.prepare(model, (x,), optimizer=SPEC, device="cpu")
    for _ in range(3):
        for m, o in ((plain, reference), (model, engine.optimizer)):
            m(x).square().sum().backward()
            o.step()
            o.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    engine.detach()
