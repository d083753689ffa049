"""`outsize probe`: measures the rates of this machine for its plans."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.base.errors import ConfigError
from outsize.base.units import show_bytes, show_seconds
from outsize.cli.options import require_file

if TYPE_CHECKING:
    from outsize.hardware.machine import Machine

_DOC = """How fast are the lanes of this machine: copies, updates, matrices?

Takes about twenty seconds, during which nothing else should run. The rates are kept in the cache (OUTSIZE_CACHE) and
used by every plan for this machine until the driver or torch changes. Without a GPU, only the host is measured.

[bold]Examples[/bold]

outsize probe

outsize probe --save box.yaml     [dim]then, anywhere: outsize plan MODEL --hardware box.yaml[/dim]
"""
_BESIDE = {"h2d": "copies in", "d2h": "copies out", "host": "host updates"}
_UNITS = {"h2d": (1e9, "GB/s"), "d2h": (1e9, "GB/s"), "host": (1e9, "G parameters/s")}


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
        raise ConfigError(f"--device: {device!r} cannot be measured. Use cuda, cuda:<number> or cpu.")
    require_file("--save", save)

    # Imports take seconds: wrong options were reported before them.
    from outsize.device.choose import choose_device
    from outsize.hardware.machine import write_machine
    from outsize.hardware.probed import keep_probe
    from outsize.profile.probe import probe as measure

    where = choose_device(device)
    machine = measure(where)
    print(show(machine))
    if where.kind == "cuda":
        kept = keep_probe(machine, where.identity)
        print(
            f"\nkept      {kept}; plans for this machine use it"
            if kept
            else "\nkept      no: without a cache (OUTSIZE_CACHE) plans do not use it"
        )
    else:
        print(
            "\nno GPU    only the host was measured: the card's rates are assumed, and plans for this machine do not "
            "use them"
        )
    if save is not None:
        save.write_text(write_machine(machine), encoding="utf-8")
        print(f"written   {save}; use it as --hardware {save}, or device='sim:{save}'")


probe.__doc__ = _DOC


def show(machine: "Machine") -> str:
    """The measurements, one line each, with the figure that plans use."""
    spec, measured = machine.spec, machine.measured
    memory, identity = measured["host_memory"], measured["identity"]
    lines = [
        f"machine   {spec.name}; {identity['cores']} cores, torch {identity['torch']}; took "
        f"{show_seconds(measured['seconds'])}; {spec.provenance}"
    ]
    limit = " (the container's limit)" if memory["container_limit_bytes"] == memory["bytes"] else ""
    lines.append(f"RAM       {show_bytes(memory['bytes'])}{limit}, {show_bytes(memory['free_bytes'])} free")
    used = {
        "h2d": spec.h2d_bytes_per_second,
        "d2h": spec.d2h_bytes_per_second,
        "host": spec.host_adam_params_per_second,
    }
    for lane, label in (("h2d", "in"), ("d2h", "out"), ("host", "updates")):
        rates = {key: found[lane] for key, found in measured["lanes_per_second"].items() if lane in found}
        if rates:
            lines.append(f"{label:<9} {_lane(lane, rates)}; plans take {used[lane] / _UNITS[lane][0]:.3g}")
    host = measured["host_adam_bytes_per_second"], measured["host_copy_bytes_per_second"]
    lines.append(f"DRAM      {host[0] / 1e9:.3g} GB/s under updates, {host[1] / 1e9:.3g} under copies within it")
    return "\n".join([*lines, *(_card(measured) if "gpu_adam_params_per_second" in measured else ())])


def _lane(lane: str, rates: dict[str, float]) -> str:
    factor, unit = _UNITS[lane]
    words = []
    for key, rate in sorted(rates.items(), key=lambda item: item[0].count("+")):
        others = [_BESIDE[other] for other in key.split("+") if other != lane]
        words.append(f"{rate / factor:.3g}" + (f" beside {' and '.join(others)}" if others else f" {unit} alone"))
    return ", ".join(words)


def _card(measured: dict[str, Any]) -> Iterator[str]:
    for way, by_size in measured["copy_bytes_per_second"].items():
        yield f"{way:<9} " + ", ".join(f"{size} {rate / 1e9:.3g}" for size, rate in by_size.items()) + " GB/s"
    yield (
        f"card      {measured['gpu_copy_bytes_per_second'] / 1e9:,.0f} GB/s; AdamW "
        f"{measured['gpu_adam_params_per_second'] / 1e9:.3g} G parameters/s"
    )
    for label, key in (("matrices", "gemm_flops"), ("attention", "attention_flops")):
        yield (
            f"{label:<9} "
            + ", ".join(f"{shape} {rate / 1e12:.3g}" for shape, rate in measured[key].items())
            + " TFLOP/s"
        )
    yield f"layer     {measured['layer_flops'] / 1e12:.3g} TFLOP/s forward and backward"
    alone, beside = (show_seconds(seconds) for seconds in measured["op_launch_seconds"].values())
    yield f"issuing   {alone} for a few hundred small operators, {beside} beside host updates"
    launch = ", ".join(f"{way} {show_seconds(seconds)}" for way, seconds in measured["launch_seconds"].items())
    allocator = measured["allocator"]
    taken = f"{show_bytes(allocator['taken_on_the_card_bytes'])} on the card taken by the process (and others)"
    yield f"overhead  {launch} a copy; {show_seconds(allocator['cached_allocation_seconds'])} an allocation; {taken}"
