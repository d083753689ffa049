"""Profiles a model from its config alone, on fake tensors: shapes and lifetimes without contents."""

import copy
import logging
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize import compat
from outsize.base.errors import ConfigError, ModelUnsupported, OutsizeError
from outsize.base.log import log
from outsize.compat import fake_tensor
from outsize.device.sim import AbsentDevice
from outsize.forecast.example import Images, example_batch, with_positions
from outsize.hardware.spec import HardwareSpec
from outsize.loss.chunked_loss import ChosenLoss, trace_with_loss
from outsize.model.adapter import Adapter, add_adapter
from outsize.model.build import load_config, trainable_class
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.weights import is_unmaterialized
from outsize.profile.counted import shape_of
from outsize.profile.fake_weights import FakeWeights
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer
from outsize.quant.replace import quantized_layers
from outsize.quant.settings import Quantization

_DATA_DEPENDENT = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
_PACKAGE = Path(__file__).resolve().parents[1]
_INSTEAD = (
    "Plan it where it runs: outsize.prepare(model, batch) measures with real weights and a real batch, and engine.plan "
    "is the plan."
)


def config_of(model: Any) -> Any:
    """A transformers config from a path, a hub id or a config object."""
    from transformers import PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"model must be a path, a hub id or a transformers config, not a {type(model).__name__}. For a model "
            "object use outsize.prepare, or pass its config."
        )
    return load_config(model, may_be_quantized=True)


def fake_trace(
    config: Any,
    spec: HardwareSpec,
    *,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    chunked_loss: bool | None = None,
    tile_tokens: int = 0,
    images: Images | None = None,
    adapter: Adapter | None = None,
    quantization: Quantization | None = None,
    batch: dict[str, Tensor] | None = None,
    bind: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[BlockGraph, ModelTrace, ChosenLoss]:
    """Trace a model without weights, and choose how its loss is computed. Changes the config. `batch`: instead of an
    example batch. `bind` is called with the model before it is traced; it may freeze parameters.
    """
    kind = trainable_class(config)
    text_config = config.get_text_config()
    config.use_cache = text_config.use_cache = False  # training does not generate
    limit = getattr(text_config, "max_position_embeddings", None)
    text = ""
    too_long = isinstance(limit, int) and tokens > limit
    torch_log = logging.getLogger(fake_tensor.__name__)
    torch_log.disabled, was = True, torch_log.disabled  # torch logs a traceback of the errors that it raises
    try:
        with torch.random.fork_rng(devices=[]), FakeWeights():
            built = cache(lambda: _without_values(kind, config, dtype, adapter, quantization).train())
            if batch is None:
                images = images or Images()
                batch, text = example_batch(kind, config, rows=rows, tokens=tokens, images=images, model=built)
            else:
                batch = with_positions(kind, batch)
            model = built()
            bind(model)
            layers = find_layers(model)

            def trace_of(_: ChosenLoss) -> tuple[BlockGraph, ModelTrace]:
                return Tracer(model, batch, layers, AbsentDevice(spec), tile_tokens=tile_tokens).trace()

            (graph, trace), loss = trace_with_loss(model, batch, trace_of, wanted=chunked_loss)
    except OutsizeError:
        raise
    except _DATA_DEPENDENT as error:
        raise ModelUnsupported(
            f"{kind.__name__} depends on the values of its weights: it needs the result of "
            f"{getattr(error, 'func', None) or error}. {_INSTEAD}"
        ) from error
    except Exception as error:
        if _is_ours(error):
            raise
        if "pixel_values" not in (batch or ()) and too_long:
            raise ConfigError(
                f"sequence_len {tokens} is more than the model's max_position_embeddings of {limit}, and the model "
                f"fails: {error}. Lower sequence_len."
            ) from error
        images_too = ", or with images as in outsize's own example batch" if "pixel_values" in (batch or ()) else ""
        raise ModelUnsupported(
            f"{kind.__name__} cannot run on shapes alone{images_too}: it fails with {type(error).__name__}: {error}. "
            f"{_INSTEAD}"
        ) from error
    finally:
        torch_log.disabled = was
    if too_long:
        log.warning("sequence_len %d is more than the %s positions of %s", tokens, limit, kind.__name__)
    counted = "FLOPs, bytes and operators" if trace.counts_launches else "FLOPs and bytes"
    provenance = f"bytes of {kind.__name__} counted on fake tensors (CPU operators), seconds estimated from {counted}"
    provenance = f"{text}; {provenance}" if text else provenance
    inputs = {name: shape for name, shape in trace.inputs.items() if name != "position_ids"}  # models compute these
    return graph, replace(trace, inputs=inputs, provenance=provenance), loss


def _is_ours(error: Exception) -> bool:
    """Whether outsize's own code raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(_PACKAGE)


def _without_values(
    kind: Any, config: Any, dtype: torch.dtype, adapter: Adapter | None, quantization: Quantization | None
) -> nn.Module:
    """The model without initialization: some initializers read their random values, which fake tensors do not have."""
    try:
        with compat.transformers().no_init_weights():
            model: Any = kind._from_config(config, dtype=dtype)
    except (KeyError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot build a {kind.__name__} from the config: {type(error).__name__}: {error}. Correct "
            "the config, or install what is missing."
        ) from error
    model.tie_weights()  # part of the initialization in transformers
    if quantization is not None:
        _quantize(model, quantization)
    return model if adapter is None else _adapted(model, adapter, dtype)


def _quantize(model: nn.Module, quantization: Quantization) -> None:
    with fake_tensor.unset_fake_temporarily():
        layers = quantized_layers(model, quantization)
    for layer in layers:
        for name, param in layer._parameters.items():
            if param is not None and is_unmaterialized(param):
                layer._parameters[name] = cast(nn.Parameter, shape_of(param))


def _adapted(model: nn.Module, adapter: Adapter, dtype: torch.dtype) -> nn.Module:
    """PEFT casts new weights by exchanging tensors, which fake ones forbid: it makes them on meta, without the mode."""
    with fake_tensor.unset_fake_temporarily(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # copies of modules_to_save read addresses
        wrapped = add_adapter(model, replace(adapter, folder=None), low_cpu_mem_usage=True)
    dtype = torch.float32 if adapter.fp32 else dtype
    fakes: dict[nn.Parameter, nn.Parameter] = {}
    for module in wrapped.modules():
        for name, param in module._parameters.items():
            # Trained ones too: copies that were made without the mode share storages with their originals.
            if param is not None and (param.device.type == "meta" or param.requires_grad):
                values = torch.empty(param.shape, dtype=dtype if param.device.type == "meta" else param.dtype)
                fake = fakes.setdefault(param, nn.Parameter(values, requires_grad=param.requires_grad))
                module._parameters[name] = fake
    return wrapped
