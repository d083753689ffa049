"""A plan from shorter rows is that of the whole rows: its bytes exactly, its seconds nearly."""

import dataclasses
import logging
from typing import Any

import pytest
import torch
import transformers

import outsize
from outsize.base.errors import DeviceOutOfMemory
from outsize.device.choose import choose_device
from outsize.model.discover import find_layers
from outsize.profile.counted import counted_trace
from outsize.profile.extrapolate import LengthPoint, extrapolated
from outsize.profile.lengths import lengths_between, lengths_of_change, lengths_to_profile
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer
from outsize.schedule.render import render
from outsize.setup.batches import pad_to_shape, take_tokens
from outsize.setup.budgeted_profile import profile_within_budget

TOKENS = 384
KINDS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=64
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16),
        **dict(num_hidden_layers=2, vocab_size=64, sliding_window=40),
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(
        **dict(n_embd=32, n_layer=2, n_head=2, n_positions=TOKENS, vocab_size=64, bos_token_id=1, eos_token_id=1)
    ),
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).train()


def batch_of(rows: int = 1, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def of_bytes(trace: ModelTrace) -> Any:
    works = [
        {s: [v for n, v in dataclasses.asdict(w).items() if n.endswith("bytes")] for s, w in call.items()}
        for call in trace.calls
    ]
    return works, trace.shared, trace.held_bytes, trace.inputs, trace.graph


def total_seconds(trace: ModelTrace) -> float:
    return sum(call["keep"].forward_seconds + call["keep"].backward_seconds for call in trace.calls)


@pytest.mark.parametrize(
    "kind",
    # Windows are extrapolated in the run below, too.
    [pytest.param(kind, marks=pytest.mark.full) if kind == "gemma3" else kind for kind in KINDS],
)
def test_an_extrapolated_profile_equals_the_measured_one_to_the_byte(kind: str) -> None:
    """Gemma 3 has windows, and GPT-2 attention with dropout: both hold tensors of tokens × tokens."""
    model, device = model_of(kind), choose_device("sim:64MiB")
    layers, batch, tile = find_layers(model), batch_of(), 32 if kind == "llama" else 0
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def traced(part: Any) -> Any:
        return Tracer(model, part, layers, device, tile_tokens=tile).trace()

    def counted(part: Any) -> ModelTrace | None:
        return counted_trace(model, part, layers, device, None, tile_tokens=tile)

    _, whole = traced(batch)
    assert bool(whole.tiled) == (kind == "llama")
    lengths = lengths_to_profile(TOKENS, lengths_of_change(model.config, rows=1, loss_chunk=0, tile_tokens=tile))
    assert len(lengths) == 3 and (kind != "gemma3" or all(40 < n < TOKENS for n in lengths))
    if kind != "llama":
        lengths = lengths[1:]  # enough for bytes
    parts = [take_tokens(batch, n) for n in lengths]
    points = [
        LengthPoint(tokens=n, trace=traced(p)[1], counted=counted(p)) for n, p in zip(lengths, parts, strict=True)
    ]
    made = extrapolated(points, TOKENS, counted(batch))
    assert made is not None and made.extrapolated_from == lengths and "counted on shapes" in made.provenance
    assert of_bytes(made) == of_bytes(whole)
    if kind == "llama":
        assert total_seconds(made) == pytest.approx(total_seconds(whole), rel=0.1)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in values.items()), "the weights are real again"


def test_without_a_count_peaks_are_never_less_and_squares_are_not_extrapolated() -> None:
    device, batch = choose_device("sim:64MiB"), batch_of()

    def points(model: Any) -> list[LengthPoint]:
        return [
            LengthPoint(tokens=n, trace=Tracer(model, take_tokens(batch, n), find_layers(model), device).trace()[1])
            for n in (96, 128, 192)
        ]

    model = model_of("llama")
    made, (_, whole) = (
        extrapolated(points(model), TOKENS, None),
        Tracer(model, batch, find_layers(model), device).trace(),
    )
    assert made is not None and "peaks grow at least in proportion" in made.provenance
    for one, other in zip(made.calls, whole.calls, strict=True):
        for strategy, work in one.items():
            exact = other.get(strategy) or other["keep"]
            assert work.forward_delta_bytes == exact.forward_delta_bytes and work.sent_bytes == exact.sent_bytes
            assert exact.forward_peak_bytes <= work.forward_peak_bytes <= 1.2 * exact.forward_peak_bytes + 2**16
            assert exact.backward_peak_bytes <= work.backward_peak_bytes <= 1.2 * exact.backward_peak_bytes + 2**16
    assert extrapolated(points(model_of("gpt2")), TOKENS, None) is None


def test_a_model_that_reads_values_is_not_counted() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.weight * float(self.weight.sum())

    model, device = Reads(), choose_device("sim:64MiB")
    weight = model.weight
    assert counted_trace(model, {"input_ids": torch.ones(1, 8, dtype=torch.int64)}, (), device, None) is None
    assert model.weight is weight


def fits_up_to(limit: int, model: Any, device: Any, tried: list[int]) -> Any:
    layers = find_layers(model)

    def trace(part: Any) -> Any:
        tried.append(part["input_ids"].shape[1])
        if tried[-1] > limit:
            raise DeviceOutOfMemory("too long")
        return Tracer(model, part, layers, device).trace()

    return trace, lambda part: counted_trace(model, part, layers, device, None)


def test_rows_that_do_not_fit_are_profiled_at_lengths_that_do() -> None:
    model, device, tried = model_of("llama"), choose_device("sim:64MiB"), list[int]()
    how = dict[str, Any](device=device, budget_bytes=device.spec.gpu_bytes)
    trace, count = fits_up_to(120, model, device, tried)
    _, found = profile_within_budget(trace, count, batch_of(), **how)
    assert tried[0] == TOKENS, "short rows are profiled whole if they fit"
    assert found.extrapolated_from == tuple(n for n in tried if n <= 120) and len(found.extrapolated_from) == 3
    assert found.inputs == {"input_ids": (1, TOKENS), "labels": (1, TOKENS)}
    with pytest.raises(DeviceOutOfMemory, match="too long"):
        profile_within_budget(*fits_up_to(4, model, device, tried), batch_of(), **how)
    with pytest.raises(DeviceOutOfMemory, match="too long"):  # no length between a change and the whole row
        profile_within_budget(trace, count, batch_of(), changes=(TOKENS - 1,), **how)


def test_long_rows_are_profiled_at_shorter_lengths_and_the_first_step_is_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outsize.setup.budgeted_profile.LONG_TOKENS", TOKENS - 1)
    caplog.set_level(logging.INFO, "outsize")
    model, batch = model_of("gemma3"), batch_of()
    engine = outsize.prepare(model, batch, device="sim:64MiB", gpu_memory="2600KiB", chunk_bytes="16KiB")
    assert engine.plan.extrapolated_from and "extrapolated to rows of" in engine.plan.provenance
    assert "time and memory are extrapolated from rows of" in render(engine.plan, engine.graph, engine.layout)
    for _ in range(3):
        out = model(**batch)
        out.loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    report = engine.report()
    assert report.gpu_peak_bytes == report.planned_gpu_bytes
    assert "the planned figures are extrapolated from rows of" in str(report)
    assert "first step: GPU peak" in caplog.text and "WARNING" not in caplog.text
    engine.close()


def test_the_lengths_are_on_one_side_of_every_change() -> None:
    assert lengths_to_profile(2**18, ()) == (2**14, 2**15, 2**16)
    assert lengths_to_profile(2**16, (16384, 2**17)) == (17408, 27648, 43008)
    assert lengths_to_profile(384, (40, 500)) == (48, 96, 192)
    assert lengths_to_profile(384, (380,)) == ()
    assert lengths_between(17408, 43008, 2) == (26624, 34816)
    config = transformers.Gemma3TextConfig(sliding_window=512)
    assert lengths_of_change(config, rows=2, loss_chunk=1024) == (512,)
    rope = dict(rope_type="longrope", original_max_position_embeddings=4096, factor=4.0)
    other = transformers.LlamaConfig()
    other.rope_parameters = rope
    assert lengths_of_change(other, rows=1, loss_chunk=0) == (4096,)
    assert lengths_of_change(None, rows=1, loss_chunk=256) == (256,)


def test_cut_rows_mask_and_restart_as_before() -> None:
    batch = {**batch_of(2), "attention_mask": torch.ones(2, TOKENS, dtype=torch.int64)}
    batch["attention_mask"][1, -1] = 0
    batch["position_ids"] = torch.arange(TOKENS // 2).repeat(2, 2)
    cut = take_tokens(batch, 64)
    assert cut is not None and {tuple(value.shape) for value in cut.values()} == {(2, 64)}
    assert int(cut["attention_mask"].sum()) == 127
    assert cut["position_ids"].tolist() == [[*range(32), *range(32)]] * 2
    assert batch["attention_mask"].shape == (2, TOKENS)
    assert take_tokens({"features": torch.ones(2, TOKENS)}, 64) is None
    longer = pad_to_shape(batch, (2, TOKENS + 2))
    assert take_tokens(longer, 8) is not None
