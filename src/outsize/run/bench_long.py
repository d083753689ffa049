"""Forward and backward of long rows without an engine, for `outsize bench --long`: what keeping layer inputs costs.

All weights and their gradients in bf16 stay on the device, gradients are set to zero in place before each step, there
is no optimizer, and the batch is one row. So the time and memory of one way to keep activations can be compared with
other libraries in the same setting. The loss is computed in chunks of tokens.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outsize.base.units import show_bytes, show_seconds
from outsize.device.device import Device
from outsize.device.sdp_kernel import use_sdp_kernel
from outsize.hardware.host import peak_rss_bytes
from outsize.loss.chunked_loss import ChunkedLossPatch
from outsize.model.build import trainable_class
from outsize.run.random_weights import random_text
from outsize.setup.activation_offload import hidden_states_offload, offload_activations

_GiB = 2**30


def _checkpoint(model: Any, device: Device) -> AbstractContextManager[Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return nullcontext()


def _offload(model: Any, device: Device, *, save_attention: bool = False) -> AbstractContextManager[Any]:
    return hidden_states_offload(model, save_attention=save_attention)


def _disk(model: Any, device: Device) -> AbstractContextManager[Any]:
    return offload_activations(model, "disk")


ACTIVATIONS: dict[str, Callable[[Any, Device], AbstractContextManager[Any]]] = {
    "hidden_states": _offload,
    "hidden_states+attention": partial(_offload, save_attention=True),
    "disk": _disk,
    "checkpoint": _checkpoint,
}
"""Ways to keep activations: layer inputs on the host; outputs of attention there too; layer inputs in a file in the
folder of temporary files; torch's checkpointing."""
WARM_UP_STEPS = 2
"""The first loads kernels. In the second, an offload makes one area of the host memory that the first has added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongResult:
    activations: str
    model: str
    device: str
    layers: int
    params: int
    tokens: int
    sdp_kernel: str
    seconds: list[float]
    """Of each step. The first two are warm-up, if there are more."""
    gpu_peak_bytes: int
    """0 if the device has no memory of its own."""
    host_peak_bytes: int
    losses: list[float]
    gradient_norm: float
    """Of the first step."""

    @property
    def timed(self) -> list[float]:
        return self.seconds[WARM_UP_STEPS:] or self.seconds

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.timed)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def record(self) -> dict[str, Any]:
        """The fields under the names that the comparison with other libraries uses."""
        return {
            "case": f"outsize {self.activations}",
            "model": self.model,
            "layers": self.layers,
            "bs": 1,
            "seq": self.tokens,
            "params": self.params,
            "tok_s": round(self.tokens_per_second),
            "step_s": round(self.step_seconds, 3),
            "timed": len(self.timed),
            "times": [round(each, 2) for each in self.seconds],
            "gpu_peak_gib": round(self.gpu_peak_bytes / _GiB, 2) if self.gpu_peak_bytes else None,
            "host_gib": round(self.host_peak_bytes / _GiB, 1),
            "gnorm": round(self.gradient_norm, 4),
            "losses": [round(loss, 4) for loss in self.losses],
            "attn": self.sdp_kernel,
            "torch": torch.__version__,
        }

    def __str__(self) -> str:
        rows = [
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("step", f"{show_seconds(self.step_seconds)}, median of {len(self.timed)}"),
            ("GPU peak", show_bytes(self.gpu_peak_bytes) if self.gpu_peak_bytes else "not measured: no GPU"),
            ("host peak", f"{show_bytes(self.host_peak_bytes)}, the whole process"),
        ]
        head = (
            f"{self.model}, {self.params:,} parameters, 1 × {self.tokens} tokens, on {self.device}; activations "
            f"{self.activations}\nforward and backward, gradients in bf16 kept, no optimizer\n"
        )
        return "\n".join([head, *(f"{name:<9}  {value}" for name, value in rows)])


def bench_long(
    name: str, config: Any, *, tokens: int, activations: str, device: Device, steps: int, sdp_kernel: str = "auto"
) -> LongResult:
    """Time `steps` steps after two. `name`: of the model, for the result. `sdp_kernel`: that of attention."""
    use_sdp_kernel(sdp_kernel, device)
    place = device.torch_device
    owner = id(config)
    device.open(owner, device.spec.gpu_bytes)  # begins to count the peak
    try:
        torch.manual_seed(0)
        with place:
            model = trainable_class(config)._from_config(config, dtype=torch.bfloat16).train()
        gradients = []
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            gradients.append(param.grad)
        batches = [{n: t.to(place) for n, t in batch.items()} for batch in random_text(config, 1, tokens, number=2)]
        loss_patch = ChunkedLossPatch(model)
        loss_patch.attach()
        seconds, losses, norm = [], [], 0.0
        with ACTIVATIONS[activations](model, device):
            for step in range(WARM_UP_STEPS + steps):
                device.synchronize()
                started = time.perf_counter()
                for gradient in gradients:
                    gradient.zero_()
                loss = model(**batches[step % len(batches)]).loss
                loss.backward()
                device.synchronize()
                seconds.append(time.perf_counter() - started)
                losses.append(float(loss.detach()))
                del loss
                if step == 0:
                    norm = float(torch.stack([g.norm(dtype=torch.float32) for g in gradients]).norm())
        loss_patch.detach()
        return LongResult(
            activations=activations,
            model=name,
            device=device.spec.name,
            layers=config.get_text_config().num_hidden_layers,
            params=sum(param.numel() for param in model.parameters()),
            tokens=tokens,
            sdp_kernel=sdp_kernel,
            seconds=seconds,
            gpu_peak_bytes=device.peak_bytes if device.has_own_memory else 0,
            host_peak_bytes=peak_rss_bytes(),
            losses=losses,
            gradient_norm=norm,
        )
    finally:
        use_sdp_kernel("auto", device)
        device.close(owner)
