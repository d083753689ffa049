"""Caches traces on disk, by a fingerprint of everything that a trace depends on: model, its code, batch, device. The
folder: base/cache_folder.py.
"""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outsize.base.cache_folder import profile_path, write_whole
from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.base.records import fingerprint, from_json, to_json
from outsize.device.device import Device
from outsize.device.sdp_kernel import allowed_kernels
from outsize.hardware.spec import ProcessOverhead
from outsize.model.batch import looks_irregular
from outsize.model.discover import Layer, is_setting
from outsize.model.graph import BlockGraph
from outsize.model.parts import describe, named_parts
from outsize.model.state import generators_of
from outsize.model.tensors import map_tensors, named_tensors
from outsize.model.weights import Weights, is_unmaterialized
from outsize.profile.calling import Loss, batch_shapes
from outsize.profile.code import fingerprint_code
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer

TRACE_FORMAT = 22


def traced(
    model: nn.Module,
    batch: Any,
    layers: tuple[Layer, ...],
    device: Device,
    weights: Weights | None = None,
    loss: Loss | None = None,
    *,
    model_loss: str = "",
    tile_tokens: int = 0,
) -> tuple[BlockGraph, ModelTrace]:
    """The trace of this model, batch shape and device: from the cache, or from a profiling run. `model_loss`: how the
    model computes its loss, if not in its own way. `tile_tokens`: see Tracer.
    """
    # The trace of a loss outside of the model is not cached, since no fingerprint covers its code.
    key = _key(model, batch, layers, device, model_loss, tile_tokens) if loss is None else ""
    path = profile_path(key) if key else None
    if path is not None and path.exists():
        try:
            data = json.loads(path.read_text())
            graph, trace = from_json(BlockGraph, data["graph"]), from_json(ModelTrace, data["trace"])
            for note in trace.notes:
                log.warning("%s", note)
            return graph, trace
        except (ConfigError, ValueError, KeyError, TypeError):
            log.warning("the cached trace %s is not readable; the model is profiled again", path)
    graph, trace = Tracer(model, batch, layers, device, weights, loss, tile_tokens=tile_tokens).trace()
    # Read the overhead last: the tracer holds tensors while it runs.
    trace = replace(
        trace, process_overhead=_process_overhead(model, device), profile_keys=(key,) if path is not None else ()
    )
    if path is not None:
        try:
            write_whole(path, json.dumps({"graph": to_json(graph), "trace": to_json(trace)}))
        except OSError as error:
            log.warning("the trace is not cached: %s. Set OUTSIZE_CACHE to a writable folder, or to nothing", error)
    return graph, trace


def _process_overhead(model: nn.Module, device: Device) -> ProcessOverhead:
    found = device.process_overhead()
    own = sum(p.untyped_storage().nbytes() for _, p in named_parts(model) if not is_unmaterialized(p))
    return replace(found, host_bytes=max(0, found.host_bytes - own))  # weights move into the plan's host memory


def _key(
    model: nn.Module, batch: Any, layers: tuple[Layer, ...], device: Device, model_loss: str = "", tile_tokens: int = 0
) -> str:
    config = getattr(model, "config", None)
    kind = device.torch_device.type
    names = {id(p): n for n, p in named_parts(model)}
    return fingerprint(
        {
            "format": TRACE_FORMAT,
            "torch": torch.__version__,
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "code": fingerprint_code(model),
            "config": repr(sorted((k, repr(v)) for k, v in config.to_dict().items()))
            if config is not None and hasattr(config, "to_dict")
            else "",
            "attention": str(getattr(config, "_attn_implementation", "")),
            "sdp_kernels": allowed_kernels(),
            "training": str([m.training for m in model.modules()]),
            "params": describe(model),
            "tied": [names[id(p)] for _, p in named_parts(model, remove_duplicate=False)],
            "modules": fingerprint(
                [[n, type(m).__qualname__, m.extra_repr(), _settings(m)] for n, m in model.named_modules()]
            ),
            "generators": len(list(generators_of(model))),  # what draws from them cannot be recomputed
            "layers": [[layer.name, layer.structure] for layer in layers],
            "loss": model_loss,
            "tiles": tile_tokens,
            "batch": {name: list(shape) for name, shape in batch_shapes(batch).items()},
            "contents": repr(map_tensors(_Described, batch)),
            "irregular": [name for name, tensor in named_tensors(batch) if looks_irregular(name, tensor)],
            "device": _speed(device),
            "autocast": [
                torch.is_autocast_enabled(kind),
                str(torch.get_autocast_dtype(kind)),
                torch.is_autocast_cache_enabled(),
            ],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    )


def _speed(device: Device) -> list[Any]:
    """The part of the key for the seconds of a trace. Its bytes do not depend on the device or its memory."""
    spec = device.spec
    return [
        device.kind,
        to_json(replace(spec, name="", gpu_bytes=0, host_bytes=0))
        if device.is_simulated
        else [spec.name, spec.sustained_clock_ratio],
    ]


def _settings(module: nn.Module) -> list[str]:
    """Plain attributes of a module, which its output may depend on."""
    return sorted(f"{k}={v!r}" for k, v in vars(module).items() if not k.startswith("_") and is_setting(v))


class _Described:
    """A tensor in a key, by shape and dtype and without its values."""

    def __init__(self, tensor: torch.Tensor):
        self._text = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"

    def __repr__(self) -> str:
        return self._text
