"""Attention of a packed row with and without a mask, forward and backward, on one GPU.

    PYTHONPATH=src python benchmarks/packed.py [--tokens 131072] [--documents 16] [--out FILE.json]

Shape of qwen3-8b's attention (32 query heads, 8 key and value heads, 128 wide), bf16, one row. `varlen` gets the
offsets of the documents, `masked` the mask of tokens × tokens that transformers builds for `sdpa`; the mask's own
making is part of its forward, once, as in a model. `layer` is a whole decoder layer of either kind. Without a mask, one
document per row is timed too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.data.packing import boundaries
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.model.packed_attention import VARLEN, register
from outsize.run.shapes import SHAPES, shape_config

REPEATS = 5


def positions_of(tokens: int, documents: int) -> Tensor:
    return torch.cat([torch.arange(len(part)) for part in np.array_split(np.arange(tokens), documents)])[None]


def decoder_layer(attention: str, tokens: int, shape: str, place: str) -> Any:
    """A model of one layer, without a head. Its mask is made as in every model."""
    from transformers import AutoModel

    config = shape_config({**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 1024}, seq=tokens)
    config._attn_implementation = attention
    with torch.device(place):
        return AutoModel.from_config(config, dtype=torch.bfloat16).train()


def measure(run: Callable[[], Tensor], device: Device, repeats: int) -> dict[str, float]:
    """Milliseconds (median) of a forward and of its backward, and the peak in GiB above what was allocated."""
    forwards, backwards = [], []
    with device.meter() as meter:
        base = meter.level()
        meter.reset_peak()
        for repeat in range(repeats + 1):
            device.synchronize()
            begin = time.perf_counter()
            out = run()
            device.synchronize()
            middle = time.perf_counter()
            out.sum().backward()
            device.synchronize()
            if repeat:  # the first loads kernels
                forwards.append(1e3 * (middle - begin))
                backwards.append(1e3 * (time.perf_counter() - middle))
            del out
        peak = (meter.peak() - base) / 2**30
    return {
        "forward_ms": round(statistics.median(forwards), 2),
        "backward_ms": round(statistics.median(backwards), 2),
        "peak_gib": round(peak, 2),
    }


def rows(
    tokens: int, documents: int, *, place: str = "cuda", shape: str = "qwen3-8b", repeats: int = REPEATS
) -> dict[str, dict[str, float]]:
    register()
    device = choose_device(place)
    found: dict[str, dict[str, float]] = {}
    for name, attention, count in (
        ("varlen", VARLEN, documents),
        ("varlen, one document", VARLEN, 1),
        ("masked", "sdpa", documents),
    ):
        positions = positions_of(tokens, count)
        given: dict[str, Any] = boundaries(positions.numpy()) if attention == VARLEN else {}
        given = {key: value.to(place) if isinstance(value, Tensor) else value for key, value in given.items()}
        model = decoder_layer(attention, tokens, shape, place)
        ids = torch.randint(1024, (1, tokens), device=place)
        places = positions.to(place)

        def layer(model: Any = model, ids: Tensor = ids, places: Tensor = places, given: Any = given) -> Tensor:
            out: Tensor = model(input_ids=ids, position_ids=places, use_cache=False, **given).last_hidden_state
            return out

        try:
            found[name] = measure(layer, device, repeats)
        except torch.cuda.OutOfMemoryError:
            found[name] = {}
        print(f"{name:24} {found[name] or 'out of memory'}", flush=True)
        del model, layer
        if device.is_gpu:
            torch.cuda.empty_cache()
    totals = {name: one["forward_ms"] + one["backward_ms"] for name, one in found.items() if one}
    if "masked" in totals:
        print(f"masked takes {totals['masked'] / totals['varlen']:.1f} × as long as varlen (layer, forward + backward)")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {
        "tokens": given.tokens,
        "documents": given.documents,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layer": rows(given.tokens, given.documents),
    }
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
