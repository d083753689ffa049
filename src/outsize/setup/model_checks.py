"""Models that `outsize.prepare` refuses, each with what to do instead."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from outsize.activation.layer_offload import is_offloaded
from outsize.base.errors import EngineMisuse, ModelUnsupported
from outsize.base.log import log
from outsize.compat import fake_tensor
from outsize.model.parts import named_parts, wrappers
from outsize.model.weights import is_unmaterialized
from outsize.runtime.prepared_tensors import owner_of


def require_supported(model: nn.Module) -> None:
    """Refuse models that outsize cannot train. The model is not changed."""
    _require_one_process()
    _require_unwrapped(model)
    _require_known_quantization(model)
    _require_plain_tensors(model)
    _require_own_memory(model)


def _require_one_process() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and (size := distributed.get_world_size()) > 1:
        raise EngineMisuse(
            f"torch.distributed is initialized with {size} processes, but outsize trains on one device: each process "
            "would train its own copy. Start one process, without a launcher."
        )


def _require_unwrapped(model: nn.Module) -> None:
    held = [name for name, param in model.named_parameters() if owner_of(param) is not None]
    if held:
        raise EngineMisuse(
            f"{held[0]} belongs to a prepared model already. Call engine.detach() of the engine that holds it first."
        )
    for path, module in model.named_modules():
        name = path or "the model"
        if is_offloaded(module):
            raise EngineMisuse(
                f"{name}: its activations are offloaded (hidden_states_offload, OffloadTrainer), and the plan would "
                "decide this too. Call disable() of that offload first, or train without prepare."
            )
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ModelUnsupported(
                f"{name} is compiled (torch.compile), and the schedule needs the model's own layers. "
                "Prepare the model without torch.compile."
            )
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ModelUnsupported(
                f"{name} is a scripted or traced module (torch.jit), in which the use of weights cannot be tracked. "
                "Prepare the model with the nn.Module that it was made from."
            )
        wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"}
        if wrappers.intersection(kind.__name__ for kind in type(module).__mro__):
            raise ModelUnsupported(
                f"{name} is a {type(module).__name__}: pass the module inside it (.module) to outsize.prepare."
            )


def note_fp32_adapters(model: nn.Module) -> None:
    """Log what fp32 LoRA weights over a bf16 base cost: PEFT makes them so by default."""
    params = dict(model.named_parameters()) if hasattr(model, "peft_config") else {}
    is_slow = any(param.dtype == torch.float32 and "lora_" in name for name, param in params.items())
    if is_slow and any(param.dtype == torch.bfloat16 and not param.requires_grad for param in params.values()):
        log.warning(
            "the LoRA weights are fp32 over a bf16 base. On an H200, an 8B model with r=16 on all linear layers then "
            "trains 27 % slower without autocast (9,111 tokens/s instead of 12,460). bf16 LoRA weights have exact "
            "fp32 master weights here: get_peft_model(..., autocast_adapter_dtype=False)."
        )


# Quantized weights.


def _require_known_quantization(model: nn.Module) -> None:
    for path, module in model.named_modules():
        name, kind = path or "the model", type(module).__name__
        if "qweight" in module._buffers:
            raise ModelUnsupported(
                f"{name} is a {kind}, quantized with GPTQ or AWQ: its weights are buffers, which stay on the device "
                "and which outsize does not stream. Use the unquantized model, or quantize it with bitsandbytes "
                "(load_in_4bit)."
            )
        forward = type(module).forward
        if (forward.__module__, forward.__qualname__) == ("bitsandbytes.nn.modules", "Linear8bitLt.forward"):
            raise ModelUnsupported(
                f"{name} is a {kind} of bitsandbytes (load_in_8bit), which replaces its weight's memory in every "
                "forward and keeps its input where no activation strategy reaches it. Load the model with "
                "outsize.model.build.build_model and Quantization(load_in_8bit=True), or in 4 bits, or unquantized."
            )
    for name, param in model.named_parameters():
        if not hasattr(param, "quant_state") or not hasattr(param, "bnb_quantized"):
            continue
        if param.quant_state is None:
            raise ModelUnsupported(
                f"{name} is to have 4 bits, but it is not quantized yet. Quantize it with model.to('cpu'), then "
                "prepare the model."
            )
        if getattr(param.quant_state, "packing_format_for_cpu", False):
            raise ModelUnsupported(
                f"{name} was repacked by a forward in eval mode on the CPU, in which bitsandbytes rounds the scales. "
                "Load the model again, and evaluate it after outsize.prepare."
            )


# Tensors without memory of their own: a plan places bytes.


def _require_plain_tensors(model: nn.Module) -> None:
    """Must run before other code looks at the tensors: many properties of such tensors raise errors in torch."""
    parts = [(part.name, part.tensor) for _, _, found in wrappers(model) for part in found]
    wrapped = {name for name, param, _ in wrappers(model) if not _is_distributed(param) and not param.requires_grad}
    for name, tensor in (*model.named_parameters(), *parts, *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelUnsupported(
                f"{name} has no shape yet (a lazy module). Run the model's forward once, then prepare it."
            )
        if tensor.is_nested:
            raise ModelUnsupported(
                f"{name} is a nested tensor, which a plan cannot place. Keep its values in one dense tensor and its "
                "lengths in another, and build the nested tensor from them in the forward."
            )
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise ModelUnsupported(
                f"{name}: a {kind} tensor cannot be placed by a plan. Keep its values in a dense parameter and build "
                "the sparse tensor from it in the forward, as PEFT's SHiRA does."
            )
        if name not in wrapped and _is_wrapper(tensor):
            raise ModelUnsupported(
                f"{name} is a {type(tensor).__name__}, a tensor subclass that keeps its values in other tensors (as "
                "quantized weights and DTensor do), and a plan places such tensors only if they are frozen parameters "
                "of one process that name their tensors (__tensor_flatten__, as torchao's do). Freeze it, use the "
                "unquantized model, or replace it by a plain tensor."
            )


def _is_distributed(param: Tensor) -> bool:
    return any(base.__module__.startswith("torch.distributed") for base in type(param).__mro__)


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether `_make_wrapper_subclass` made the tensor: its storage has no memory, and `data_ptr` raises."""
    if type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, fake_tensor.FakeTensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True
    return False


# Tensors over the same memory. outsize gives each parameter memory of its own, so a write to one would no longer reach
# the other. Views into different parts of one storage (flattened weights, one mapped file) are separate and pass.


@dataclass(slots=True)
class _Range:
    name: str
    tensor: Tensor
    first: int
    end: int
    """Both are addresses."""

    @property
    def is_param(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def is_trained(self) -> bool:
        return self.is_param and self.tensor.requires_grad


def _require_own_memory(model: nn.Module) -> None:
    devices: dict[torch.device, list[_Range]] = {}
    for name, tensor in (*named_parts(model), *model.named_buffers()):
        if _has_memory(tensor):
            devices.setdefault(tensor.device, []).append(_Range(name, tensor, *_extent(tensor)))
    for ranges in devices.values():
        for one, other in _overlapping(ranges):
            if one.is_param and other.is_param:
                first, second = _path(one.name), _path(other.name)
                raise ModelUnsupported(
                    f"{one.name} and {other.name} are two parameters over the same memory: an optimizer would update "
                    f"it twice, with a state for each. To train one weight, assign the parameter itself ({second} = "
                    f"{first}); to train two, give one a copy (nn.Parameter({second}.detach().clone()))."
                )
            param, buffer = (one, other) if one.is_param else (other, one)
            raise ModelUnsupported(
                f"{param.name} and the buffer {buffer.name} share memory, and outsize moves the parameter to memory of "
                "its own: the buffer would keep the old values. Read the parameter where the buffer is read, or give "
                "the buffer a copy."
            )


def _path(name: str) -> str:
    """A parameter's name as Python code: `model.layers[3].mlp.weight`."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in name.split("."))


def _has_memory(tensor: Tensor) -> bool:
    return (
        not tensor.is_meta
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not is_unmaterialized(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlapping(ranges: list[_Range]) -> Iterator[tuple[_Range, _Range]]:
    """Pairs where an update of one would change the other."""
    open_ranges: list[_Range] = []
    for later in sorted(ranges, key=lambda r: r.first):
        open_ranges = [r for r in open_ranges if r.end > later.first]
        for earlier in open_ranges:
            if (earlier.is_trained or later.is_trained) and _share_elements(earlier, later):
                yield earlier, later
        open_ranges.append(later)


def _share_elements(one: _Range, other: _Range) -> bool:
    """Whether two overlapping ranges have an element in common. Columns of one matrix have none."""
    size, base = one.tensor.element_size(), min(one.first, other.first)
    if other.tensor.element_size() != size or (one.first - other.first) % size:
        return True
    of_one = torch.zeros((max(one.end, other.end) - base) // size, dtype=torch.bool)
    of_one.as_strided(one.tensor.shape, one.tensor.stride(), (one.first - base) // size).fill_(True)
    return bool(of_one.as_strided(other.tensor.shape, other.tensor.stride(), (other.first - base) // size).any())
