"""Builds a Hugging Face model from its folder without reading its weights: unmaterialized parameters, real buffers, and
the source of the weights.
"""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize import compat
from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.base.log import log
from outsize.hub import hub_answers, require_model_path
from outsize.model.pruned import pruned_class
from outsize.model.quantized import quantization_section, refuse_quantized_config
from outsize.model.weights import FileWeights, Weights, unmaterialize
from outsize.quant.reading import quantize, quantize_in_memory
from outsize.quant.settings import Quantization
from outsize.quant.stored import adopt_layers, read_quantized, require_converted


@dataclass(frozen=True, slots=True)
class Built:
    model: nn.Module
    weights: Weights | None
    """None: the model has its weights already."""


def build_model(
    path: str,
    *,
    dtype: torch.dtype,
    random: bool = False,
    weights_from: str | None = None,
    attn_implementation: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    rope_parameters: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    for_adapter: bool = False,
    quantization: Quantization | None = None,
) -> Built:
    """A model that can be trained.

    Args:
        path: a folder with config.json and safetensors, or a hub id.
        dtype: of the weights, whatever the files have.
        random: weights are drawn (from torch's generator), not read.
        weights_from: read them from this folder instead: a checkpoint of the same model.
        overrides, rope_parameters: as of `overridden`.
        trust_remote_code: run the model code that the folder has, if transformers has no such model.
        for_adapter: the weights may be quantized.
        quantization: of the linear layers, while they are read.
    """
    from accelerate import init_empty_weights
    from transformers import GenerationConfig

    config = load_config(path, for_adapter=for_adapter, trust_remote_code=trust_remote_code)
    config = overridden(config, overrides, rope_parameters)
    section = quantization_section(config.to_dict())
    if section is not None:
        without_quantization(config)
    kind = (_class_of_folder(config, path) if trust_remote_code else None) or trainable_class(config)
    settings = {"dtype": dtype, **({"attn_implementation": attn_implementation} if attn_implementation else {})}
    with nullcontext() if random else init_empty_weights(include_buffers=False):
        model = kind._from_config(config, **settings).train()
    if random:
        if quantization is not None:
            quantize_in_memory(model, quantization)
        return Built(model, None)
    model.tie_weights()  # init_empty_weights makes two parameters of a tied one
    folder = Path(weights_from) if weights_from else local_folder(path)
    weights: FileWeights | None
    if section is None:
        weights = FileWeights(folder, model)
    elif (weights := read_quantized(folder, model, section, quantization)) is None:
        require_converted(folder, section)
        config.quantization_config = section
        whole = _loaded_whole(kind, config, folder, {**settings, "device_map": "cpu"})
        adopt_layers(whole, quantization)
        return Built(whole, None)
    if rounded := weights.rounded(model):
        some = f"{rounded[0]} and {len(rounded) - 1} other weights are" if len(rounded) > 1 else f"{rounded[0]} is"
        log.warning(
            "%s: %s stored with more precision than %s and rounded to it. bf16: false (dtype float32) keeps every bit.",
            folder,
            some,
            _name(dtype),
        )
    # transformers decides which weights stay fp32 in a bf16 model, and which are not tied in spite of the config.
    if section is None and (
        _is_converted(model, weights) or weights.untied() or getattr(model, "_keep_in_fp32_modules_strict", None)
    ):
        weights.close()
        whole = _loaded_whole(kind, config, folder, settings)
        if quantization is not None:
            quantize_in_memory(whole, quantization)
        return Built(whole, None)
    weights.require_whole()
    weights.fill_buffers(model)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    source: Weights = weights if section is not None or quantization is None else quantize(model, weights, quantization)
    return Built(unmaterialize(model), source)


def without_quantization(config: Any) -> Any:
    """The same config, changed: layers are made as of the unquantized model first."""
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return config


def overridden(
    config: Any, overrides: Mapping[str, Any] | None = None, rope_parameters: Mapping[str, Any] | None = None
) -> Any:
    """The config, with values replaced by `overrides`, and values of its rope parameters by `rope_parameters`."""
    given = dict(overrides or {})
    scaling = given.pop("rope_scaling", None)  # the older name
    rope = {**(given.pop("rope_parameters", scaling) or {}), **(rope_parameters or {})}
    for name, value in given.items():
        if not hasattr(config, name):
            raise ConfigError(
                f"overrides_of_model_config: {type(config).__name__} has no {name}. Correct or remove it."
            )
        setattr(config, name, value)
    if rope:
        _override_rope(config.get_text_config(), rope)
    return config


def _override_rope(config: Any, given: dict[str, Any]) -> None:
    saved = getattr(config, "rope_parameters", None)
    if not saved:
        raise ConfigError(f"rope_parameters: {type(config).__name__} has no rotary embeddings. Remove it.")
    per_kind = {name for name, value in saved.items() if isinstance(value, dict)}
    if per_kind and not all(name in per_kind and isinstance(value, Mapping) for name, value in given.items()):
        raise ConfigError(
            f"rope_parameters: {type(config).__name__} has parameters per kind of layer, and {', '.join(given)} were "
            f"given. Put them below {' or '.join(sorted(per_kind))}."
        )
    if "type" in given:  # the older name
        given = {"rope_type": given["type"], **{name: value for name, value in given.items() if name != "type"}}
    config.rope_parameters = saved | ({name: saved[name] | dict(given[name]) for name in given} if per_kind else given)
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        text = str(error.args[0] if error.args else error).rstrip(". ")
        raise ConfigError(f"rope_parameters: {text}. Correct them.") from None


def require_positions(config: Any, sequence_len: int) -> None:
    """A learned table of positions is finite. Rotary embeddings are not, but the model was trained on the positions of
    its config only; scaling extends them.
    """
    text = config.get_text_config()
    saved = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    known = max([saved, *_scaled_positions(rope or {}, saved)]) if saved else sequence_len
    if sequence_len > known:
        remedy = "Set rope_parameters (rope_type and factor), or lower it" if rope else "Lower it"
        raise ConfigError(
            f"sequence_len: {sequence_len} exceeds the model's {known} positions. {remedy}; longer examples are split."
        )


def _scaled_positions(rope: dict[str, Any], saved: int) -> list[int]:
    """The positions that scaled rotary embeddings have, per kind of layer."""
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or saved))
        for kind in kinds
        if kind.get("factor")
    ]


def load_config(
    model: str | Path, *, may_be_quantized: bool = False, for_adapter: bool = False, trust_remote_code: bool = False
) -> Any:
    """Load a model's config. A quantized model is refused, with the name of the method; `for_adapter`: if it cannot be
    read. `trust_remote_code`: run the folder's own code, if transformers has no such config.
    """
    from transformers import AutoConfig

    path, local = Path(model), {}
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} has an adapter, not a whole model. To train it further, name its base here and set "
            f"lora_model_dir: {path}. Or merge it (outsize export {path} merged --merge) and name that folder."
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"{path} has no config.json. Name the folder that a model was saved to.")
    if not path.exists():  # transformers would ask the hub, with retries for half a minute
        require_model_path(str(model))
        local = {} if hub_answers(str(model), file="config.json") else {"local_files_only": True}
    try:
        place = path.parent if _is_config(path) else model
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **local)
    except (OSError, ValueError, KeyError) as error:
        if local:
            raise ConfigError(
                f"{model}: there is no such folder, and the hub cannot be reached. Correct the path, or download the "
                "model where there is network and name its folder."
            ) from None
        raise ConfigError(
            f"{model}: transformers cannot load its config: {_first_line(error)}. Name a folder with a config.json, "
            "that file, or a hub id."
        ) from None
    if not may_be_quantized:
        refuse_quantized_config(config.to_dict(), model, for_adapter=for_adapter)
    return config


def absolute_if_local(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_config(path: Path) -> bool:
    return path.is_file() and path.name == "config.json"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def trainable_class(config: Any) -> Any:
    """The class that the config names, if it can be trained. If it names none, or the model without a head: the
    language model of that kind.
    """
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_MAPPING,
    )

    if pruned := getattr(config, "pruned_layers", None):
        if "module" in pruned:
            raise ModelUnsupported(
                f"{pruned['parent']}: a pruned model of a class that transformers lacks. Load it with transformers "
                "(trust_remote_code=True) and pass it to outsize.prepare."
            )
        return pruned_class(config)
    names = config.architectures or []
    tables = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING]
    # The table of language models may have the decoder alone, as of Whisper, which is another model.
    if config.is_encoder_decoder:
        tables = [MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    named = [getattr(transformers, name, None) for name in names]
    known = [table.get(type(config), None) for table in tables]
    bare = MODEL_MAPPING.get(type(config), None)
    # A config that names a head means that head. If it is unknown, or cannot be trained with these inputs, the model is
    # refused and not replaced by the language model.
    has_head = any(kind is None or kind not in (bare if isinstance(bare, tuple) else (bare,)) for kind in named)
    for kind in named if has_head else [*named, *known]:
        if kind is not None and {"input_ids", "labels"} <= inspect.signature(kind.forward).parameters.keys():
            return kind
    others = [kind.__name__ for kind in known if has_head and kind is not None]
    raise ModelUnsupported(
        f"The config names {', '.join(names) or 'no architecture'} ({type(config).__name__}), which is no class of "
        "transformers with the inputs input_ids and labels. Build the model yourself and pass it to outsize.prepare"
        + (f", or name {others[0]} in its architectures if that is meant." if others else ".")
    )


def _class_of_folder(config: Any, path: str) -> Any:
    """The language model in the code of a model's folder, if transformers does not have the config's class."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if name is None or not type(config).__module__.startswith("transformers_modules"):
        return None
    return get_class_from_dynamic_module(name, str(Path(path).parent if _is_config(Path(path)) else path))


def local_folder(path: str) -> Path:
    """The folder of a model. The files of a hub id are downloaded to the hub's cache."""
    if _is_config(Path(path)):
        return Path(path).parent
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no folder, and no hub id that can be downloaded: {_first_line(error)}. Download it, and name "
            "the folder."
        ) from error


def _is_converted(model: nn.Module, weights: FileWeights) -> bool:
    """Whether transformers makes weights that the files lack from others that they have: single experts, old names, a
    base without its prefix.
    """
    private = compat.transformers()

    rules = private.get_model_conversion_mapping(model)
    renamings, converters = (
        [rule for rule in rules if isinstance(rule, kind)] for kind in (private.WeightRenaming, private.WeightConverter)
    )
    places = model.state_dict()
    made = {
        private.rename_source_key(key, renamings, converters, model.base_model_prefix, places)[0]
        for key in weights.unexpected
    }
    return not made.isdisjoint(weights.missing)


def _loaded_whole(kind: Any, config: Any, folder: Path, settings: dict[str, Any]) -> nn.Module:
    """Through transformers, into host memory; the engine then takes the parameters over one by one, so there is still
    no second copy.
    """
    log.info("%s are stored in another form than they are run in: transformers converts them", folder)
    model, found = kind.from_pretrained(folder, config=config, output_loading_info=True, **settings)
    if found["missing_keys"] or found["mismatched_keys"]:
        names = ", ".join(map(str, sorted([*found["missing_keys"], *found["mismatched_keys"]], key=str)[:6]))
        raise BadFile(f"{folder} lacks {names}. Use the folder that the model was saved to.")
    return model.train()
