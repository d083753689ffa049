"""A transformers model whose layers differ: in width, without attention or feed-forward, or with one matrix instead.

In config.json, `per_layer_config` has what differs and `pruned_layers` where the parts of a layer are. outsize builds
such a model from its config; a folder also contains this module's text as modeling_pruned.py, for plain transformers.
"""

import copy
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MODELING_FILE = "modeling_pruned.py"


class Replacement(nn.Module):
    """In place of attention or feed-forward: adds nothing to the residual stream, or a linear map of its input."""

    def __init__(self, layer: int, size: int | None, num_outputs: int):
        """`num_outputs`: items of the tuple that it returns; 0 if it returns a tensor."""
        super().__init__()
        self.layer, self.num_outputs = layer, num_outputs
        self.linear = None if size is None else nn.Linear(size, size, bias=False)

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = torch.zeros_like(hidden_states) if self.linear is None else self.linear(hidden_states)
        if past_key_values is not None:  # a cache counts tokens by the keys of one layer: here of width one
            keys = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            past_key_values.update(keys, keys, self.layer)
        return (output, *[None] * (self.num_outputs - 1)) if self.num_outputs else output


class PrunedLayers:
    """Before a class of transformers: builds its layers each from a config of its own."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any):
        uniform = copy.deepcopy(config)
        uniform.per_layer_config = None
        super().__init__(uniform, *args, **kwargs)  # type: ignore[call-arg]
        for kind in ("_attn_implementation", "_experts_implementation"):  # before the layers' configs are copied
            setattr(config, kind, getattr(uniform, kind))
        layers = self.get_submodule(config.pruned_layers["list"])
        for index, layer in enumerate(layers):
            own = config.per_layer_config[index]
            layers[index] = _replace(type(layer)(own, index), index, own)
        for module in self.modules():
            # One config for all, so that its attention implementation reaches every layer. Sizes are in the layers;
            # reading one of them from this config raises.
            if getattr(module, "config", None) is not None:
                module.config = config
        self.post_init()

    def code_files(self: Any) -> dict[str, str]:
        """The files that a folder of this model needs besides weights and configs."""
        return {MODELING_FILE: modeling_text(self.config)}

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        for name, text in self.code_files().items():
            (Path(save_directory) / name).write_text(text)


def _replace(layer: Any, index: int, config: Any) -> Any:
    parts = config.pruned_layers["parts"]
    linear = getattr(config, "linear", [])
    for name, part in parts.items():
        if name in config.skip or name in linear:
            size = config.hidden_size if name in linear else None
            setattr(layer, part["module"], Replacement(index, size, part["num_outputs"]))
    # A norm goes with the last part that uses it.
    used = {norm for name, part in parts.items() if name not in config.skip for norm in part["norms"]}
    for norm in {norm for part in parts.values() for norm in part["norms"]} - used:
        setattr(layer, norm, nn.Identity())
    return layer


def pruned_class(config: Any, parent: Any = None) -> Any:
    """The class of a config with `pruned_layers`, without code of the model's folder. `parent`: that of the teacher;
    None: the class of transformers that the config names.
    """
    import transformers

    parent = parent or getattr(transformers, config.pruned_layers["parent"])
    return type(f"Pruned{parent.__name__}", (PrunedLayers, parent), {"__module__": __name__})


def modeling_text(config: Any) -> str:
    """The file that transformers loads with trust_remote_code: this module, and the class of the config."""
    text = inspect.getsource(sys.modules[__name__])
    parent, module = config.pruned_layers["parent"], config.pruned_layers.get("module")
    where = f".{module}" if module else "transformers"
    class_line = f"class Pruned{parent}(PrunedLayers, {parent}):"
    if class_line in text.splitlines():
        return text
    return f"{text}\n\nfrom {where} import {parent}  # noqa: E402\n\n\n{class_line}\n    pass\n"
