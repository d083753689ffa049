"""Offloads activations of a model that is trained without an engine: any loop or Trainer, the user's optimizer."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.activation.layer_offload import LayerOffload
from outsize.base.errors import EngineMisuse, ModelUnsupported
from outsize.base.log import log
from outsize.base.units import parse_bytes
from outsize.device.choose import choose_device, device_of
from outsize.device.device import Device
from outsize.hardware.host import free_host_bytes
from outsize.model.discover import find_layers
from outsize.model.offloading import OFFLOADING, OffloadingName
from outsize.runtime.prepared_tensors import owner_of
from outsize.transfer.arena import Arena
from outsize.transfer.file_arena import FileArena
from outsize.transfer.host_arena import HostArena
from outsize.transfer.transfer_queue import TransferQueue

_IN_FLIGHT, _PREFETCH = 2, 1
_KEEP_LAST = _IN_FLIGHT + _PREFETCH
"""The layers that backward needs first: their copies could not return in time, or would gain nothing."""
_KEEP_LAST_OF_LARGE_SETS = _PREFETCH
"""With outputs of attention sets are twice as large, with all that layers save many times. All that are kept are on the
GPU at the peak: the backward of the last layer."""


def enable_hidden_states_offload(
    model: nn.Module,
    *,
    save_attention: bool = False,
    blocks: Sequence[str] | None = None,
    host_memory: str | int | None = None,
    device: str | Device | None = None,
) -> LayerOffload:
    """Recompute every layer in backward, and keep the inputs of layers in host memory until then.

    GPU memory then holds the inputs of a few layers, however many the model has. Gradients have the same bits as with
    torch.utils.checkpoint. No engine and no plan: the loop, the optimizer and where the weights are stay yours. It
    replaces `gradient_checkpointing_enable`, which is turned off.

    Args:
        model: the model, or a wrapper of it (DDP, FSDP2, PEFT).
        save_attention: also keep the outputs of attention in host memory: its kernels run once per layer, not twice.
        blocks: paths of the lists of layers (`["model.layers"]`). Default: they are found in the module tree.
        host_memory: limit of pinned host memory, such as "64GiB". Default: nine tenths of what is free at first use.
        device: a simulated device, for tests. Default: the device of each layer's input.

    Returns:
        The handle: `disable()` makes the model a plain one again; `num_sent`, `arena_bytes` and `used_bytes` count.
    """
    return enable_offload(
        model, "hidden_states", save_attention=save_attention, blocks=blocks, host_memory=host_memory, device=device
    )


@contextmanager
def hidden_states_offload(
    model: nn.Module,
    *,
    save_attention: bool = False,
    blocks: Sequence[str] | None = None,
    host_memory: str | int | None = None,
    device: str | Device | None = None,
) -> Iterator[LayerOffload]:
    """`enable_hidden_states_offload` within a block."""
    how: dict[str, Any] = dict(save_attention=save_attention, blocks=blocks, host_memory=host_memory, device=device)
    with offload_activations(model, "hidden_states", **how) as handle:
        yield handle


@contextmanager
def offload_activations(model: nn.Module, name: OffloadingName, **how: Any) -> Iterator[LayerOffload]:
    """`enable_offload` within a block."""
    handle = enable_offload(model, name, **how)
    try:
        yield handle
    finally:
        handle.disable()


def enable_offload(
    model: nn.Module,
    name: OffloadingName,
    *,
    save_attention: bool = False,
    blocks: Sequence[str] | None = None,
    host_memory: str | int | None = None,
    folder: str | Path | None = None,
    device: str | Device | None = None,
) -> LayerOffload:
    """Offload activations as a value of `activation_offloading` says. `folder`: of the files of `disk`. Default: that
    of temporary files.
    """
    record = OFFLOADING[name]
    _require_supported(model)
    layers = find_layers(model, blocks)
    if not layers:
        raise ModelUnsupported(
            f"{type(model).__name__}: no layers were found, so nothing would be offloaded. Name the lists with "
            "blocks=['path.to.list'], or train without the offload."
        )
    is_frozen = has_frozen_base(model)
    strategy = record.frozen if is_frozen else record.full
    is_large = save_attention or strategy == "swap"
    keep_last = 0 if record.is_synchronous else _KEEP_LAST_OF_LARGE_SETS if is_large else _KEEP_LAST
    if name == "hidden_states" and is_frozen:
        log.warning(
            "hidden_states recomputes every layer, and most weights are frozen. activation_offloading: true copies "
            "what layers save instead, without recomputing."
        )
    limit = None if host_memory is None else parse_bytes(host_memory, name="host_memory")
    chosen = choose_device(device) if device is not None else None

    def make_queue(place: torch.device) -> TransferQueue:
        on = chosen or device_of(place)
        arena: Arena
        if record.on_disk:
            arena = FileArena(on, folder or tempfile.gettempdir())
        else:
            arena = HostArena(on, int(free_host_bytes() * 0.9) if limit is None else limit)
        return TransferQueue(
            on,
            arena=arena,
            is_static=lambda tensor: False,  # the strategies leave weights out
            max_in_flight=1 if record.is_synchronous else _IN_FLIGHT,
            prefetch=0 if record.is_synchronous else _PREFETCH,
            keep_last=keep_last,
        )

    return LayerOffload(
        model, layers, strategy, make_queue, save_attention=save_attention, is_synchronous=record.is_synchronous
    )


def has_frozen_base(model: nn.Module) -> bool:
    """Whether most weights are frozen, as under an adapter."""
    sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    return 2 * sum(size for size, is_trained in sizes if is_trained) < sum(size for size, _ in sizes)


def _require_supported(model: nn.Module) -> None:
    if held := [name for name, param in model.named_parameters() if owner_of(param) is not None]:
        raise EngineMisuse(
            f"{held[0]} belongs to a prepared model, whose plan decides what is offloaded. Use pins, or call "
            "engine.detach() first."
        )
    for path, module in model.named_modules():
        name = path or "the model"
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ModelUnsupported(f"{name} is compiled (torch.compile). Offload activations without torch.compile.")
        if isinstance(module, nn.DataParallel):
            raise ModelUnsupported(f"{name} is a DataParallel, which copies layers. Use DistributedDataParallel.")
