"""FlatModule: trains a small module whose weights, gradients and optimizer state all stay on the device.

Weights lie in one buffer, with gradients, lower halves of masters and moments beside them. A step is one update per
dtype, over all parameters and the padding between them, which is and stays zero. The bits are those of
`outsize.reference` and of the engine: norm, clipping and kernels are the same.
"""

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, NonFiniteGradient
from outsize.base.units import ALIGN_BYTES
from outsize.device.device import Device
from outsize.layout.chunks import Chunk, Piece, aligned_numel, joined_ranges
from outsize.layout.norm import norm_parts
from outsize.layout.optimizer import PIECE_NUMEL, ChunkUpdate
from outsize.optim.clip import clip_factor
from outsize.optim.norm import GradientNorm, not_finite
from outsize.optim.rule import Numbers, Scratch, update
from outsize.optim.spec import OptimizerSpec
from outsize.optim.state import split_state

Numels = Mapping[str, tuple[int, torch.dtype]]
"""Elements and dtype of each parameter."""


def flat_bytes(numels: Numels, spec: OptimizerSpec) -> int:
    """Device bytes of a FlatModule with these parameters, without its buffers and without the shared scratch."""
    return _Layout(numels, spec).nbytes


def scratch_bytes(spec: OptimizerSpec) -> int:
    """Device bytes of `new_scratch`."""
    return spec.rule.layout.scratch_bytes(PIECE_NUMEL)


def new_scratch(device: Device, spec: OptimizerSpec) -> Scratch:
    """Workspace for the updates of any number of FlatModules, one at a time."""
    return Scratch(device.empty(scratch_bytes(spec)))


@dataclass(frozen=True, slots=True)
class Stepped:
    norm: float
    """Of the gradients, before clipping."""
    is_applied: bool
    """False: the norm is not finite, and the step was skipped."""


class FlatModule:
    def __init__(self, module: nn.Module, spec: OptimizerSpec, device: Device, scratch: Scratch):
        """Moves the module's parameters and buffers to the device. Gradients of a backward are added to the buffer;
        `param.grad` stays None. `spec` has one group, of all parameters that require grad.
        """
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self.module, self._spec, self._scratch = module, spec, scratch
        self.num_skipped = 0
        """Steps skipped because of a gradient that is not finite, with `nonfinite="skip"`."""
        self._layout = _Layout({name: (p.numel(), p.dtype) for name, p in params.items()}, spec)
        self._memory = device.empty(self._layout.nbytes)
        self._memory.zero_()
        norm = self._memory[self._layout.norm_at :]
        self._norm = GradientNorm({name: param.numel() for name, param in params.items()}, norm)
        self._parts = [_Part(self._memory[start:], *chunk) for start, chunk in self._layout.parts]
        self._shapes = {name: param.shape for name, param in params.items()}
        self._steps = dict.fromkeys(params, 0)
        """Updates made, by parameter."""
        self._accumulated: set[str] = set()
        """Parameters with a gradient."""
        self._gradients: dict[str, Tensor] = {}
        for part in self._parts:
            for piece in part.chunk.pieces:
                param, where = params[piece.name], slice(piece.offset, piece.offset + piece.numel)
                with torch.no_grad():
                    part.weights[where].copy_(param.data.reshape(-1))
                    param.data = part.weights[where].view(param.shape)
                self._gradients[piece.name] = part.gradients[where].view(param.shape)
                self._hook(piece.name, param)
        for param in module.parameters():
            if not param.requires_grad:
                param.data = device.keep(param.data)
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = device.keep(buffer)

    def _hook(self, name: str, param: nn.Parameter) -> None:
        me = weakref.ref(self)  # the garbage collector does not see hooks on tensors

        def take(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is not None and (flat := me()) is not None:
                flat._add(name, grad)

        param.register_post_accumulate_grad_hook(take)

    @torch.no_grad()
    def _add(self, name: str, grad: Tensor) -> None:
        total = self._gradients[name]
        total.add_(grad) if name in self._accumulated else total.copy_(grad)
        self._accumulated.add(name)

    def step(self, lr: float) -> Stepped:
        """`measure` and `apply` in one. Waits for the device."""
        return self.apply(float(self.measure()), lr)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """The norm of the accumulated gradients, a float64 scalar on the device."""
        for name in self._shapes:
            if name in self._accumulated:
                self._norm.measure(name, self._gradients[name])
        return self._norm.measure_total(without=self._shapes.keys() - self._accumulated)

    @torch.no_grad()
    def apply(self, norm: float, lr: float) -> Stepped:
        """Clip and apply the accumulated gradients, and clear them. `norm`: what `measure` gave. Raises
        NonFiniteGradient with `nonfinite="raise"`; nothing is changed then. A parameter without gradient is not
        touched.
        """
        names = [name for name in self._shapes if name in self._accumulated]
        self.discard()
        if not math.isfinite(norm):
            if self._spec.nonfinite == "raise":
                sums = self._norm.sums.cpu()
                wrong = [name for name in not_finite(sums, self._norm.slices) if name in names] or names
                raise NonFiniteGradient(
                    f"{wrong[0]}: its gradient is not finite, and nothing was updated. Lower the learning rate or "
                    "check the batch; nonfinite: skip skips such steps."
                )
            self.num_skipped += 1
            return Stepped(norm, False)
        self._update(names, lr, clip_factor(norm, self._spec.max_grad_norm))
        return Stepped(norm, True)

    def _update(self, names: Iterable[str], lr: float, clip: float) -> None:
        rule, group = self._spec.rule, {**self._spec.defaults, "lr": lr}
        of_step: dict[int, Numbers] = {}
        numbers: dict[str, Numbers] = {}
        for name in names:
            self._steps[name] += 1
            count = self._steps[name]
            if count not in of_step:
                of_step[count] = rule.numbers(group, count)
            numbers[name] = of_step[count]
        for part in self._parts:
            for start, end, used in joined_ranges(part.padded, numbers):
                where = slice(start, end)
                state, lo = [tensor[where] for tensor in part.state], None if part.lo is None else part.lo[where]
                args = rule, part.weights[where], lo, state, part.gradients[where]
                update(*args, numbers=used, clip=clip, scratch=self._scratch)

    def discard(self) -> None:
        """Clear the accumulated gradients."""
        self._accumulated.clear()

    def state(self) -> dict[str, Tensor]:
        """All that steps change: `NAME` (the weight), `NAME/lo`, `NAME/exp_avg` and so on as views, and `NAME/step`.
        Accumulated gradients are no part of it.
        """
        found: dict[str, Tensor] = {}
        for part in self._parts:
            flats = {"": part.weights, **dict(zip(part.update.state, part.state, strict=True))}
            flats |= {} if part.lo is None else {"lo": part.lo}
            for piece in part.chunk.pieces:
                for key, flat in flats.items():
                    value = flat[piece.offset : piece.offset + piece.numel].view(self._shapes[piece.name])
                    found[f"{piece.name}/{key}".rstrip("/")] = value
                found[f"{piece.name}/step"] = torch.tensor(self._steps[piece.name])
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state from `state()`. Raises BadFile if names, shapes or dtypes differ; nothing is changed then."""
        own = self.state()
        if own.keys() != state.keys():
            names = sorted(own.keys() ^ state.keys())
            raise BadFile(f"{names[0]}: saved and trained parameters differ in {len(names)} tensors. Start anew.")
        for name, value in own.items():
            if (given := state[name]).shape != value.shape or given.dtype != value.dtype:
                raise BadFile(
                    f"{name}: {tuple(given.shape)} in {given.dtype} was saved, but {tuple(value.shape)} in "
                    f"{value.dtype} is trained. Start anew."
                )
        for name, value in own.items():
            value.copy_(state[name])
        self._steps = {name: int(state[f"{name}/step"]) for name in self._steps}
        self.discard()


class _Part:
    """The parameters of one dtype."""

    def __init__(self, memory: Tensor, chunk: Chunk, change: ChunkUpdate):
        self.chunk, self.update = chunk, change
        grads, state = _aligned(chunk.nbytes), _aligned(chunk.nbytes) + _aligned(change.gradient_bytes)
        self.weights = memory[: chunk.nbytes].view(getattr(torch, chunk.dtype))
        self.gradients = memory[grads : grads + change.gradient_bytes].view(getattr(torch, change.gradient_dtype))
        self.state, self.lo = split_state(memory[state : state + change.state_bytes], change)
        ends = [piece.offset for piece in chunk.pieces[1:]] + [chunk.numel]
        self.padded = [
            Piece(name=piece.name, offset=piece.offset, numel=end - piece.offset)
            for piece, end in zip(chunk.pieces, ends, strict=True)
        ]
        """Each parameter with the padding behind it, so that neighbours touch."""


class _Layout:
    """Where everything lies in the buffer."""

    def __init__(self, numels: Numels, spec: OptimizerSpec):
        by_dtype: dict[str, list[Piece]] = {}
        ends: dict[str, int] = {}
        for name, (numel, dtype) in numels.items():
            key = str(dtype).removeprefix("torch.")
            offset = ends.get(key, 0)
            by_dtype.setdefault(key, []).append(Piece(name=name, offset=offset, numel=numel))
            ends[key] = offset + aligned_numel(numel, key)
        self.parts: list[tuple[int, tuple[Chunk, ChunkUpdate]]] = []
        """First byte of each dtype's memory."""
        end = 0
        for index, (key, pieces) in enumerate(by_dtype.items()):
            chunk = Chunk(index=index, calls=(), dtype=key, updated="weights", numel=ends[key], pieces=tuple(pieces))
            change = spec.rule.layout.update_of(chunk, fp32_grads=spec.fp32_grads)
            assert change is not None
            self.parts.append((end, (chunk, change)))
            end += sum(map(_aligned, (chunk.nbytes, change.gradient_bytes, change.state_bytes)))
        self.norm_at = end
        self.nbytes = end + sum(norm_parts([numel for numel, _ in numels.values()]))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
