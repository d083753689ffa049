"""Costs of sub-blocks: parameters and cache add up to those of whole models."""

import pruned_models
import pytest
import torch
from pruned_models import CHANGES, parts, teacher_config

from outsize.device.choose import choose_device
from outsize.methods.bypass.costs import CostMeter, Use
from outsize.methods.bypass.pruned_config import LayerChange


def meter(kind, **how):
    from transformers import AutoModelForCausalLM

    config = teacher_config(kind)
    parent = type(AutoModelForCausalLM.from_config(config))
    return CostMeter(
        config,
        parent,
        "model.layers",
        parts(kind),
        choose_device("cpu"),
        torch.bfloat16,
        Use(batch=2, context=16),
        **how,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_parameters_and_cache_add_up_to_the_whole_model(kind):
    costs = meter(kind, timed=False)
    model = pruned_models.pair(kind, torch.bfloat16).pruned
    layers = range(model.config.num_hidden_layers)
    found = [costs.outside()]
    for layer in layers:
        change = CHANGES.get(layer, LayerChange())
        found += [costs.beside_parts(layer), *(costs.cost(layer, part, change) for part in ("attention", "mlp"))]
    assert sum(each.params for each in found) == sum(each.numel() for each in model.parameters())
    assert sum(each.weight_bytes for each in found) == sum(each.nbytes for each in model.parameters())
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=True).past_key_values
    whole = sum(each.keys.nbytes + each.values.nbytes for each in cache.layers) / 4
    placeholder = 2 * 2 * sum("attention" in CHANGES[layer].skip | CHANGES[layer].linear for layer in layers)
    assert sum(each.kv_bytes for each in found) == whole - placeholder
    assert costs.cost(2, "mlp", CHANGES[2]).params == 0


def test_seconds_are_measured_once_per_shape():
    costs = meter("llama")
    small = LayerChange({"intermediate_size": 32})
    first = costs.cost(0, "mlp", small)
    assert first.prefill_seconds >= 0 and first.decode_seconds >= 0
    assert costs.cost(3, "mlp", small) is not first and costs.cost(3, "mlp", small) == first
    assert len(costs._known) == 2
    use = Use(batch=2, context=16, decoded=4)
    assert use.latency(first) == first.prefill_seconds + 4 * first.decode_seconds
    attention = costs.cost(0, "attention", LayerChange())
    assert use.memory(attention) == attention.weight_bytes + 2 * 20 * attention.kv_bytes
    assert attention.kv_bytes == 2 * 4 * 16 * 2
