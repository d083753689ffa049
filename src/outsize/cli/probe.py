"""`outsize probe`: measures this machine, so that plans for it use its own rates."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import ConfigError
from outsize.base.units import show_bytes, show_seconds
from outsize.cli.options import require_file
from outsize.hardware.lanes import lane_words

if TYPE_CHECKING:
    from outsize.hardware.machine import Machine

_DOC = """How fast are copies, updates and matrix products on this machine?

Takes less than twenty seconds, during which nothing else should run. The rates are saved in the cache (OUTSIZE_CACHE)
and used by every plan for this machine until the driver or torch changes. Without a GPU, only the host is measured.

[bold]Examples[/bold]

outsize probe

outsize probe --save box.yaml     [dim]then, anywhere: outsize plan MODEL --hardware box.yaml[/dim]
"""


def probe(
    save: Annotated[
        Path | None, typer.Option(help="Write the machine to this YAML file, for --hardware and device='sim:FILE'.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda, cuda:1, …; cpu for the host alone.", show_default="the GPU if there is one"),
    ] = None,
) -> None:
    if device is not None and device.partition(":")[0] not in ("cuda", "cpu"):
        raise ConfigError(f"--device {device} cannot be measured. Use cuda, cuda:<number> or cpu.")
    require_file("--save", save)

    # Imports take seconds: wrong options were reported before them.
    from outsize.calibration.probe import probe as measure
    from outsize.calibration.rates import save_probe
    from outsize.device.choose import choose_device
    from outsize.hardware.machine import write_machine

    measured_device = choose_device(device)
    machine = measure(measured_device)
    print(show(machine))
    if not measured_device.is_gpu:
        print("\nOnly the host was measured: the GPU's rates are assumed. Plans for this machine do not use them.")
    elif path := save_probe(machine, measured_device.identity):
        print(f"\nSaved as {path}; plans for this machine use it.")
    else:
        print("\nNot saved: there is no cache (OUTSIZE_CACHE), so plans do not use it.")
    if save is not None:
        save.write_text(write_machine(machine), encoding="utf-8")
        print(f"Written to {save}. Use it as --hardware {save} or device='sim:{save}'.")


probe.__doc__ = _DOC


def show(machine: "Machine") -> str:
    """The measured rates, one line each."""
    spec, measured = machine.spec, machine.measured
    identity, update_rate = measured["identity"], f"{spec.host_adam_params_per_second / 1e9:.3g} G parameters/s"
    lines = {
        "machine": f"{spec.name}; {identity['cores']} cores, torch {identity['torch']}; {spec.provenance}, in "
        f"{show_seconds(measured['seconds'])}",
        "host memory": f"{show_bytes(spec.host_bytes)}; {spec.host_bytes_per_second / 1e9:.3g} GB/s in updates",
        lane_words("host"): update_rate,
    }
    if "step_per_second" in measured:
        alone, beside = (show_seconds(seconds) for seconds in measured["op_launch_seconds"].values())
        gemms = ", ".join(f"{shape} {rate / 1e12:.3g}" for shape, rate in measured["gemm_flops"].items())
        lines |= {
            lane_words("host"): f"{update_rate} beside copies, "
            f"{measured['host_adam_params_per_second'] / 1e9:.3g} alone",
            lane_words("h2d"): f"{spec.h2d_bytes_per_second / 1e9:.3g} GB/s beside CPU updates",
            lane_words("d2h"): f"{spec.d2h_bytes_per_second / 1e9:.3g} GB/s beside CPU updates",
            "GPU memory": f"{measured['gpu_copy_bytes_per_second'] / 1e9:,.0f} GB/s",
            "GPU updates": f"{spec.gpu_adam_params_per_second / 1e9:.3g} G parameters/s",
            "matrix products": f"{gemms} TFLOP/s",
            "kernel launches": f"{alone} for 600 small operators, {beside} beside CPU updates",
            "overhead": f"{show_seconds(spec.launch_seconds)} a copy; {show_bytes(spec.context_bytes)} of GPU memory "
            "for the CUDA context",
        }
    return "\n".join(f"{label:<19} {text}" for label, text in lines.items())
