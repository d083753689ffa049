"""Writes the model that was chosen, layer by layer, into a folder that transformers loads."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.checkpoint.model_folder import write_model_folder
from outsize.methods.bypass.padding import padded
from outsize.methods.bypass.pruned_config import (
    LayerChange,
    Part,
    PartPlace,
    pruned_config,
    require_refused,
    with_layers,
)
from outsize.methods.bypass.variants import Variant
from outsize.model.build import local_folder
from outsize.model.pruned import pruned_class
from outsize.run.model_code import model_code
from outsize.run.prune_choice import change_of
from outsize.run.prune_scores import Pick, Variants
from outsize.run.tokenizer import load_tokenizer

Form = Literal["per_layer", "uniform", "padded"]
PRUNE_FILE = "prune.json"


@dataclass(frozen=True, slots=True)
class _Design:
    form: Form
    model: nn.Module
    """Without weights."""
    layers: tuple[int, ...]
    """By layer of the model: which layer of the teacher it is."""
    is_remote: bool
    """The teacher's class is code of its folder."""


class Assembly:
    def __init__(self, variants: Variants, chosen: Mapping[int, Sequence[Variant]], places: Mapping[Part, PartPlace]):
        self._variants, self._setup = variants, variants.setup
        self._chosen, self._places = chosen, places
        self._tensors: tuple[int, dict[str, Tensor]] | None = None
        """Of the layer that is being written: its number in the teacher, and its changed tensors."""

    def require(self, form: Form | None) -> None:
        """Raise the error of `write` for a form that this model cannot have."""
        self._design(form)

    def write(self, folder: Path, form: Form | None, facts: Mapping[str, Any], *, is_raw: bool = False) -> Form:
        """`facts`: for prune.json. Returns the form of the folder. A folder that exists is refused."""
        design = self._design(form)
        teacher: Any = self._setup.stack.model
        if teacher.can_generate() and design.model is not teacher:
            design.model.generation_config = teacher.generation_config

        code = model_code(local_folder(self._setup.config.base_model)) if design.is_remote else None
        config: Any = design.model.config
        own = config.auto_map if hasattr(design.model, "code_files") else {}
        if code is not None and own:
            config.pruned_layers = {**config.pruned_layers, "module": code.model_module}
        config.auto_map = {**({} if code is None else code.auto_map), **own}
        if not config.auto_map:
            del config.auto_map

        def extra(into: Path) -> None:
            for name, path in {} if code is None else code.files.items():
                shutil.copyfile(path, into / name)
            load_tokenizer(self._setup.config).save_pretrained(into)
            (into / PRUNE_FILE).write_text(json.dumps({"form": design.form, **facts}, indent=1) + "\n")

        write_model_folder(folder, design.model, lambda name: self._value(design, name, is_raw=is_raw), extra)
        self._tensors = None
        return design.form

    def _design(self, form: Form | None) -> _Design:
        from accelerate import init_empty_weights

        teacher: Any = self._setup.stack.model
        parent: Any = type(teacher)
        is_remote = parent.__module__.startswith("transformers_modules")
        count = len(self._setup.stack.layers)
        changes = {
            layer: change_of(self._setup.parts[layer], variants) for layer, variants in self._chosen.items() if variants
        }
        changes = {layer: change for layer, change in changes.items() if change != LayerChange()}
        whole = frozenset(self._places)
        kept = tuple(layer for layer in range(count) if changes.get(layer, LayerChange()).skip != whole)
        kinds = {_key(changes.get(layer, LayerChange())) for layer in kept}
        (one,) = (changes.get(kept[0], LayerChange()),) if len(kinds) == 1 else (None,)
        is_uniform = one is not None and not one.skip and not one.linear
        if form is None:
            form = "uniform" if is_uniform else "per_layer"
        if form == "uniform" and not is_uniform:
            raise ConfigError("prune.form: uniform, but the chosen layers differ. Use shape: uniform, or another form.")
        if form == "padded":
            return _Design(form, teacher, tuple(range(count)), is_remote)
        if form == "uniform":
            assert one is not None
            config = with_layers(teacher.config, kept)
            for name, value in one.sizes.items():
                setattr(config, name, value)
            kind, layers = parent, kept
        else:
            config = pruned_config(teacher.config, parent, self._setup.stack.path, self._places, changes)
            require_refused(config)
            kind, layers = pruned_class(config, parent), tuple(range(count))
        with init_empty_weights(include_buffers=False):
            model = kind._from_config(config, dtype=teacher.dtype)
        model.tie_weights()
        return _Design(form, model, layers, is_remote)

    def _value(self, design: _Design, name: str, *, is_raw: bool) -> Tensor:
        """A tensor of the model's state dict."""
        prefix = f"{self._setup.stack.path}."
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            layer = design.layers[int(number)]
            if layer in self._chosen:
                if self._tensors is None or self._tensors[0] != layer:
                    self._tensors = layer, self._changed(layer, design.form, is_raw=is_raw)
                if rest in self._tensors[1]:
                    return self._tensors[1][rest]
            name = f"{prefix}{layer}.{rest}"
        return self._of_teacher(name)

    def _of_teacher(self, name: str) -> Tensor:
        model, teacher = self._setup.stack.model, self._setup.teacher
        params = dict(model.named_parameters(remove_duplicate=False))
        if name not in params:
            return model.get_buffer(name).detach().cpu()
        teacher.load([params[name]])
        value = params[name].detach().to("cpu", copy=True)
        if teacher.is_in_files:
            teacher.release([params[name]])
        return value

    def _changed(self, layer: int, form: Form, *, is_raw: bool) -> dict[str, Tensor]:
        setup, made = self._setup, dict[str, Tensor]()
        params = list(setup.stack.layers[layer].module.parameters())
        setup.teacher.load(params)
        try:
            for variant in self._chosen[layer]:
                student = self._variants.student(Pick(layer, variant, is_raw))
                tensors = {name: tensor.detach().cpu() for name, tensor in student.layer_tensors().items()}
                if form == "padded":
                    for change in variant.changes:
                        tensors = {**tensors, **padded(setup.parts[layer], change, tensors)}
                made |= tensors
        finally:
            setup.teacher.release(params)
        return made


def _key(change: LayerChange) -> Any:
    return tuple(sorted(change.sizes.items())), change.skip, change.linear
