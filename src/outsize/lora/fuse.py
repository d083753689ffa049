"""`outsize.fuse_lora`: PEFT's LoRA layers compute with our autograd Functions.

[Note: Classes are exchanged] A fused module gets a subclass of its class, and nothing is set on the instance. So it is
copied and pickled with its model, PEFT and others still find their own classes (`isinstance`), attributes such as
`forward` stay free for wrappers (accelerate's hooks, our tiles), and setting the class back undoes everything. The
subclass decides at each call whether its Function computes what the module computes in its current state, and runs the
module's own forward otherwise: with merged, disabled or several adapters, DoRA, other dtypes, hooks on parts, a base
layer whose `forward` was replaced. A fused MLP does not call its projections, nor a `forward` that is set on one of
them later.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError, EngineMisuse
from outsize.base.log import log
from outsize.compat import peek_functorch
from outsize.lora.base_weight import base_weight
from outsize.lora.functions import GatedProjections, LoraLinear, gated_mlp
from outsize.lora.gated_mlp import GatedMLP, recognize
from outsize.lora.projection import autocast_dtype, has_hooks, is_plain, projection_of

Part = Literal["mlp", "qkv", "o"]
PARTS: tuple[Part, ...] = ("mlp", "qkv", "o")
M = TypeVar("M", bound=nn.Module)


def fuse_lora(model: M, parts: Collection[Part] = PARTS) -> M:
    """Let the LoRA layers of a PEFT model compute with less memory and fewer kernels. Changes the model in place.

    Each fused layer saves its input alone and adds the adapter's product to the base's output in place. A gated MLP
    (SwiGLU, GeGLU) saves its input and the outputs of its gate and up projections. Results differ from PEFT's by
    rounding. LoRA and rsLoRA over bf16, fp16, fp32, 4-bit, int8 and fp8 weights are fused, with dropout too. Layers
    of other kinds (DoRA, embeddings, convolutions) and in other states (merged or disabled adapters, several active
    ones, adapters in another dtype than their base without autocast) run PEFT's forward.

    Call it before `outsize.prepare`. It needs no engine: the fused model also trains in plain PyTorch.

    Args:
        model: a model with PEFT adapters.
        parts: what is fused. "o": the last linear layer of each attention; "qkv": its others; "mlp": all layers outside
            of attention. Layers of other parts get PEFT's forward back, so `parts=()` undoes an earlier call.

    Returns:
        The same model.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"fuse_lora: parts has {unknown[0]!r}. Choose among {', '.join(PARTS)}.")
    layers = {path: module for path, module in model.named_modules() if _is_lora(module)}
    for path, layer in layers.items():
        if prepared := [
            name for name, param in layer.named_parameters() if param.requires_grad and not is_plain(param)
        ]:
            raise EngineMisuse(
                f"fuse_lora: {path}.{prepared[0]} belongs to a prepared model, whose plan is for the forward that it "
                "had. Call fuse_lora before outsize.prepare, or after engine.detach()."
            )
    for module in model.modules():
        _restore(module)
    if not parts:
        return model
    part_of = _parts(model)
    left: Counter[str] = Counter()
    num_fused = num_mlps = 0
    for layer in layers.values():
        if part_of[layer] not in parts:
            continue
        if type(layer).forward not in _known_forwards():
            left[f"{type(layer).__name__} layer"] += 1
            continue
        reason = _why_not_now(layer)
        left.update([reason] if reason else [])
        num_fused += not reason
        layer.__class__ = _fused(_FusedProjection, type(layer))
    for module in list(model.modules()) if "mlp" in parts else ():
        names = [
            name
            for name, child in module.named_children()
            if isinstance(child, _FusedProjection) and part_of[child] == "mlp"
        ]
        if (found := recognize(module, names)) is not None:
            module.__class__ = _fused(_FusedMLP, type(module), found)
            num_mlps += 1
    kept = ", ".join(f"{reason} ({count})" for reason, count in left.items())
    log.info(
        "fused LoRA: %d of %d layers, %d gated MLPs as a whole%s",
        num_fused, num_fused + left.total(), num_mlps, f"; PEFT's forward runs in the others: {kept}" if kept else "",
    )  # fmt: skip
    return model


class _FusedProjection:
    """Before the class of a LoRA layer in the order of bases."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and _takes(x):
            autocast = autocast_dtype(x.device)
            found = projection_of(self, x.dtype, autocast)
            if not isinstance(found, str):
                y: Tensor = LoraLinear.apply(found, x.to(found.dtype), found.a, found.b)
                return y
        out: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, _FusedProjection, super().__reduce_ex__(protocol))


class _FusedMLP:
    """Before the class of a gated MLP in the order of bases."""

    gated: GatedMLP
    _modules: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _takes(args[0]):
            found = self._projections(args[0])
            if found is not None:
                return gated_mlp(found, args[0].to(found.gate.dtype))
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _projections(self, x: Tensor) -> GatedProjections | None:
        """None: the module must call its parts."""
        found: list[Any] = []
        gated, autocast, given = self.gated, autocast_dtype(x.device), x.dtype
        for name in (gated.gate, gated.up, gated.down):
            layer = self._modules[name]
            if not isinstance(layer, _FusedProjection) or has_hooks(layer):  # type: ignore[arg-type]
                return None
            projection = projection_of(layer, autocast or given if name == gated.down else given, autocast)
            if isinstance(projection, str):
                return None
            found.append(projection)
        gate, up, down = found
        return GatedProjections(gate, up, down, gated.activation, gated.up_first)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, _FusedMLP, super().__reduce_ex__(protocol))


def _takes(x: Any) -> bool:
    """Whether our Functions take this input: an ordinary tensor, outside of transforms of torch.func."""
    return isinstance(x, Tensor) and is_plain(x) and peek_functorch() is None


_CLASSES: dict[tuple[type, type[nn.Module], GatedMLP | None], type[nn.Module]] = {}


def _fused(mixin: type, kind: type[nn.Module], gated: GatedMLP | None = None) -> type[nn.Module]:
    """The class of a fused module. It has another name than its own class, since layers and profiles are compared by
    the names of classes.
    """
    key = mixin, kind, gated
    if key not in _CLASSES:
        names = {"__module__": __name__, "__qualname__": f"Fused{kind.__qualname__}", "__doc__": kind.__doc__}
        _CLASSES[key] = type(f"Fused{kind.__name__}", (mixin, kind), {**names, "gated": gated})
    return _CLASSES[key]


def _reduced(module: Any, mixin: type, reduced: Any) -> Any:
    """For copy and pickle, which cannot import a class that was made at run time."""
    _, _, *rest = reduced
    return _new, (mixin, _own_class(module), module.gated), *rest


def _new(mixin: type, kind: type[nn.Module], gated: GatedMLP | None) -> nn.Module:
    made = _fused(mixin, kind, gated)
    return made.__new__(made)


def _own_class(module: nn.Module) -> type[nn.Module]:
    own: type[nn.Module] = type(module).__mro__[2] if is_fused(module) else type(module)
    return own


def is_fused(module: nn.Module) -> bool:
    """Whether the module reads the parameters of its parts without calling them, in most of its states."""
    return isinstance(module, _FusedProjection | _FusedMLP)


def _restore(module: nn.Module) -> None:
    own = _own_class(module)
    if own is not type(module):
        module.__class__ = own


def _is_lora(module: nn.Module) -> bool:
    layer = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and isinstance(module, layer.LoraLayer)


def _known_forwards() -> list[Any]:
    """The forwards of PEFT that add s (x Aᵀ) Bᵀ to the output of their base."""
    bitsandbytes: Any = sys.modules.get("peft.tuners.lora.bnb")
    quantized = (getattr(bitsandbytes, name, None) for name in ("Linear4bit", "Linear8bitLt"))
    return [
        sys.modules["peft.tuners.lora.layer"].Linear.forward,
        *(kind.forward for kind in quantized if kind is not None),
    ]


def _why_not_now(layer: Any) -> str:
    """Why PEFT's forward runs without autocast for an input in the dtype of the base. "": it does not run."""
    weight = base_weight(layer.base_layer)
    if isinstance(weight, str):
        return weight
    with torch.enable_grad():
        found = projection_of(layer, weight.dtype or next(layer.lora_A.parameters()).dtype, None)
    return found if isinstance(found, str) else ""


def _parts(model: nn.Module) -> dict[nn.Module, Part]:
    """The part of every LoRA layer. An attention is a module whose class is named so, outside of others."""
    found: dict[nn.Module, Part] = {module: "mlp" for module in model.modules() if _is_lora(module)}
    outer = "."
    for path, module in model.named_modules():
        if path.startswith(outer):
            continue
        name = type(module).__name__.lower()
        if ("attention" in name or "attn" in name) and "layer" not in name and "block" not in name:
            outer = f"{path}."
            linears = list(_linears(module))
            found.update({linear: "o" if linear is linears[-1] else "qkv" for linear in linears if linear in found})
    return found


def _linears(module: nn.Module) -> Iterator[nn.Module]:
    """Linear layers, and LoRA layers in place of what they adapt."""
    for child in module.children():
        if _is_lora(child) or isinstance(child, nn.Linear):
            yield child
        else:
            yield from _linears(child)
