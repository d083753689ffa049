"""Hidden size: a model of the teacher's class with fewer residual channels, and how its tensors are cut from the
teacher's.

The class is built again with a smaller `hidden_size`, which shows the dimension of each tensor that has residual
channels. The channels that are kept are the same everywhere in the model. RMS norms divide by the root mean square of
fewer channels, so their weights are rescaled.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.methods.bypass.students import copied
from outsize.methods.bypass.tensors import kept
from outsize.model.weights import convert, unmaterialize

NormForm = Literal["weight", "one_plus_weight"]
"""What an RMS norm multiplies with."""
_SAME = 1e-4
"""Relative, of norms in fp32."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The residual channels that are kept."""

    keep: Tensor
    """Their numbers, ascending."""
    scales: Mapping[str, float]
    """By path of the norm: the factor of its output."""

    @classmethod
    def ranked(cls, statistics: Mapping[str, Tensor], count: int) -> "Channels":
        """The channels with the largest outputs of norms, summed over all norms. `statistics`: of `NormStatistics`."""
        names = sorted(name for name in statistics if name.startswith("outputs/"))
        scores = torch.stack([statistics[name] for name in names]).sum(0)
        return cls.given(statistics, kept(scores, len(scores), count))

    @classmethod
    def given(cls, statistics: Mapping[str, Tensor], keep: Tensor) -> "Channels":
        """These channels, with scales from the inputs of the norms.

        A norm divides by the root mean square of its input, now over the kept channels alone. Its factor is what that
        grows by, so that the kept channels have the same size after the norm.
        """
        scales = {}
        for name in sorted(name.removeprefix("inputs/") for name in statistics if name.startswith("inputs/")):
            energy = statistics[f"inputs/{name}"]
            own, whole = float(energy[keep].mean()), float(energy.mean())
            if not (math.isfinite(own) and math.isfinite(whole) and own > 0):
                raise ModelUnsupported(
                    f"{name}: its input is zero or not finite in the {len(keep)} kept channels, so hidden_size "
                    "cannot rescale it. Remove hidden_size, or check the teacher and the data."
                )
            scales[name] = math.sqrt(own / whole)
        return cls(keep, scales)

    @classmethod
    def first(cls, size: int, count: int, norms: Mapping[str, Any]) -> "Channels":
        """The first ones, for models in which the other channels are zero."""
        return cls(torch.arange(count), dict.fromkeys(norms, math.sqrt(size / count)))


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a teacher's tensors are cut."""

    size: int
    """Residual channels of the teacher."""
    count: int
    dims: Mapping[str, int]
    """By name of parameter: the dimension that has residual channels. Others stay as they are."""
    norms: Mapping[str, NormForm]
    """By path: the norms over residual channels."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By name of parameter, or path of norm: of weights and of outputs, beside the norms' scales."""

    def with_scaled_embedding(self, teacher: Any, layers: str) -> "Reduction":
        """For a class that scales its embedding by the root of the hidden size. `layers`: the path of their list."""
        factor = math.sqrt(self.size / self.count)
        embedding = teacher.get_input_embeddings().weight
        factors = {name: factor for name, param in teacher.named_parameters() if param is embedding}
        if teacher.get_output_embeddings().weight is embedding:
            # The head has the factor too: the norm in front of it takes it back.
            factors |= {path: 1 / factor for path in self.norms if not path.startswith(f"{layers}.")}
        return replace(self, factors=factors)

    def cut(self, name: str, tensor: Tensor, channels: Channels) -> Tensor:
        if name not in self.dims:
            return tensor
        made = tensor.index_select(self.dims[name], channels.keep.to(tensor.device))
        owner, _, last = name.rpartition(".")
        if owner in self.norms and last == "weight":
            return _rescaled(made, self.norms[owner], channels.scales[owner] * self.factors.get(owner, 1.0))
        return _rescaled(made, "weight", self.factors[name]) if name in self.factors else made

    @torch.no_grad()
    def masked(self, name: str, layer: nn.Module, keep: Tensor) -> nn.Module:
        """A copy of the teacher's layer of this name that neither reads nor writes the other channels."""
        made = copied(layer)
        lost = torch.ones(self.size, dtype=torch.bool)
        lost[keep] = False
        for rest, param in made.named_parameters():
            full = f"{name}.{rest}"
            if full in self.dims and full.rpartition(".")[0] not in self.norms:
                param.index_fill_(self.dims[full], lost.nonzero().flatten().to(param.device), 0)
        return made


def _rescaled(weight: Tensor, form: NormForm, scale: float) -> Tensor:
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    made = wide * scale if form == "weight" else (1 + wide) * scale - 1
    return made.to(weight.dtype)


def reduced_model(teacher: Any, count: int) -> nn.Module:
    """A model of the teacher's class with `count` residual channels, unmaterialized. The sizes of heads stay."""
    from accelerate import init_empty_weights

    config = _reduced_config(teacher, count)
    with init_empty_weights(include_buffers=False):
        attention = teacher.config._attn_implementation
        model = type(teacher)._from_config(config, dtype=teacher.dtype, attn_implementation=attention)
    model.tie_weights()
    if teacher.can_generate():
        model.generation_config = teacher.generation_config
    dtypes = {name: param.dtype for name, param in teacher.named_parameters()}
    unmaterialize(model.eval().requires_grad_(False))
    convert(model, dtypes)
    return model


def _reduced_config(teacher: Any, count: int) -> Any:
    config = teacher.config
    if config.get_text_config() is not config:
        raise unsupported(type(teacher).__name__, "it has more than a language model (a vision or audio tower)")
    if getattr(config, "per_layer_attributes", None) or getattr(config, "pruned_layers", None):
        raise unsupported(type(teacher).__name__, "its config has sizes of single layers")
    size, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(size, int):
        raise unsupported(type(teacher).__name__, "its config has no hidden_size")
    if not count < size:
        raise ConfigError(f"prune.hidden_size: {count} is not below the teacher's {size}. Lower it, or remove it.")
    made = copy.deepcopy(config)
    made.hidden_size = count
    if isinstance(heads, int) and not isinstance(getattr(config, "head_dim", None), int) and size % heads == 0:
        made.head_dim = size // heads  # else the class would take it from the new hidden size
    try:
        return type(config).from_dict(made.to_dict())
    except Exception as error:  # of the config's own checks
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(
            f"prune.hidden_size: {type(config).__name__} refuses {count} ({reason}). Choose another number, such as a "
            f"multiple of {heads} that is below {size}."
        ) from error


def find_reduction(teacher: nn.Module, reduced: nn.Module) -> Reduction:
    """Raises ModelUnsupported with the name of what cannot be cut. Reads no weights."""
    size, count = (int(model.config.hidden_size) for model in (teacher, reduced))  # type: ignore[union-attr, arg-type]
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(teacher).items()}
    now = {name: tuple(tensor.shape) for name, tensor in _tensors(reduced).items()}
    if changed := sorted(shapes.keys() ^ now.keys()):
        raise unsupported(changed[0], "its class has it only with some hidden sizes")
    dims: dict[str, int] = {}
    for name, shape in shapes.items():
        differ = [dim for dim, (was, new) in enumerate(zip(shape, now[name], strict=True)) if was != new]
        if not differ:
            continue
        if len(differ) > 1 or (shape[differ[0]], now[name][differ[0]]) != (size, count):
            raise unsupported(
                name, f"its class makes {now[name]} of {shape}, so another size also depends on the hidden size"
            )
        dims[name] = differ[0]
    params = dict(teacher.named_parameters())
    if buffers := sorted(dims.keys() - params.keys()):
        raise unsupported(buffers[0], "a buffer has residual channels")
    norms: dict[str, NormForm] = {}
    for path, module in teacher.named_modules():
        own = dict(module.named_parameters(recurse=False, prefix=path))
        if own and all(param.dim() == 1 for param in own.values()) and own.keys() & dims.keys():
            norms[path] = _form(path, module, reduced.get_submodule(path), size, count)
    return Reduction(size, count, dims, norms)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


@torch.no_grad()
def _form(path: str, module: nn.Module, reduced: nn.Module, size: int, count: int) -> NormForm:
    """Found by running it: with weights that must give zero, and without the channels that are zero."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, size, generator=rng) + 1, torch.randn(size, generator=rng)
    others = {
        name: torch.randn(size, generator=rng)
        for name, param in module.named_parameters(recurse=False)
        if name != "weight" and param.shape == (size,)
    }

    def output(of: nn.Module, weight: Tensor, hidden: Tensor) -> Tensor:
        given = {name: value[: hidden.shape[-1]] for name, value in {**others, "weight": weight}.items()}
        made: Tensor = functional_call(of, given, (hidden,))
        return made

    hidden[:, count:] = 0
    forms: tuple[NormForm, ...] = ("weight", "one_plus_weight")
    try:
        for form in forms:
            nothing = torch.zeros(size) if form == "weight" else -torch.ones(size)
            if output(module, nothing, hidden).abs().max() > _SAME:
                continue
            expected = output(module, weight, hidden)
            made = output(reduced, _rescaled(weight[:count], form, math.sqrt(size / count)), hidden[:, :count])
            is_same = (made - expected[:, :count]).abs().max() <= _SAME * expected.abs().max()
            if is_same and expected[:, count:].abs().max() == 0:
                return form
    except Exception as error:  # it takes other arguments
        raise unsupported(path, f"{type(module).__name__} is no RMS norm ({error})") from error
    raise unsupported(path, f"{type(module).__name__} is no RMS norm (it subtracts the mean, or has a bias)")


def unsupported(name: str, why: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"prune.hidden_size: {name}: {why}. Remove hidden_size; widths, heads and layers can be pruned without it."
    )


def adapt_to_zeros(reduced: nn.Module, reduction: Reduction) -> None:
    """Change the eps of the norms to what it is where the other channels are zeros: then the reduced model must compute
    the same.
    """
    for path in reduction.norms:
        module = reduced.get_submodule(path)
        for name in ("eps", "epsilon", "variance_epsilon"):
            if isinstance(value := getattr(module, name, None), float):
                setattr(module, name, value * reduction.size / reduction.count)


def is_same_output(expected: Tensor, found: Tensor) -> bool:
    """Whether hidden states are equal within rounding. Rounding may send a few tokens to other experts."""
    expected, found = expected.double(), found.double()
    is_close = (expected - found).square().sum(-1) <= 1e-3 * expected.square().sum(-1)
    return float(is_close.double().mean()) > 0.7


def require_same_output(name: str, expected: Tensor, found: Tensor) -> None:
    """Raise ModelUnsupported if the reduced model computes something else than the teacher without the channels."""
    if not is_same_output(expected, found):
        raise unsupported(
            name, "with fewer channels, its class computes something else than the teacher whose channels are zero"
        )
