"""Tiles on fake tensors: the same modules and bytes as on tensors, and the memory that they are for."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from unit.forecast.test_forecast import config_of, real_model

from outsize.device.sim import AbsentDevice
from outsize.forecast.example import batch_for
from outsize.forecast.fake_trace import fake_trace
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.model.strategies import TILE_TOKENS
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer

ROWS, TOKENS, TILE = 2, 24, 10


@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.full)])
def test_a_fake_trace_with_tiles_equals_a_real_one_to_the_byte(kind: str) -> None:
    config, spec = config_of(kind), lookup("rtx4090")
    model = real_model(config, torch.bfloat16)
    batch = batch_for(type(model), ROWS, TOKENS)
    _, trace = Tracer(model, batch, find_layers(model), AbsentDevice(spec), tile_tokens=TILE).trace()
    _, fake, _ = fake_trace(config, spec, rows=ROWS, tokens=TOKENS, dtype=torch.bfloat16, tile_tokens=TILE)
    assert fake.tile_tokens == TILE and "model.layers.0.mlp" in fake.tiled
    assert dataclasses.replace(fake, provenance="") == dataclasses.replace(trace, provenance="")


@pytest.mark.full
def test_the_backward_of_an_8b_layer_at_128k_tokens_needs_at_most_12_times_its_input() -> None:
    tokens, layer_input = 131_072, 2**30

    def trace(tile: int) -> ModelTrace:
        config: Any = transformers.Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=tokens,
            tie_word_embeddings=False,
        )
        how: dict[str, Any] = dict(rows=1, tokens=tokens, dtype=torch.bfloat16, tile_tokens=tile)
        return fake_trace(config, lookup("h200"), **how)[1]

    whole, tiled = trace(0).work(2, "offload"), trace(TILE_TOKENS).work(2, "offload")
    assert whole.backward_peak_bytes > 32 * layer_input
    # Flash attention on CUDA has a sum of queries' gradients in fp32 too: two more.
    assert tiled.backward_peak_bytes < (12 - 2) * layer_input
    assert tiled.forward_peak_bytes < 6 * layer_input < 11 * layer_input <= whole.forward_peak_bytes
