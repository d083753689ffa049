"""Options that several commands share."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outsize.base.errors import ConfigError
from outsize.run.shapes import require_one_of

if TYPE_CHECKING:
    from outsize.forecast.forecast import Forecast

ConfigPath = Annotated[str, typer.Argument(help="A folder with a config.json, that file, or a hub id.", metavar="PATH")]
Hardware = Annotated[
    str, typer.Option(help="A machine of the catalog, a machine's YAML file, or a size such as 64MiB.")
]
# The names of the YAML file, and shorter ones.
SEQUENCE_LEN, MICRO_BATCH = ("--sequence-len", "--seq"), ("--micro-batch-size", "--micro-batch")
SequenceLen = Annotated[int, typer.Option(*SEQUENCE_LEN, help="Tokens of a row.")]
MicroBatch = Annotated[
    int | None, typer.Option(*MICRO_BATCH, help="Rows of a batch.", show_default="1; with --batch-size, the fastest")
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Rows of an optimizer step: micro-batches and accumulation follow from it.", show_default=False),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(help="Most GPU memory to use, such as 24GiB, CUDA context included.", show_default="the machine's"),
]
HostMemory = Annotated[
    str | None, typer.Option(help="Most host memory to use.", show_default="the machine's, less a tenth")
]
Accumulate = Annotated[
    int | None,
    typer.Option(help="Backward passes per optimizer step.", show_default="1, or what --batch-size makes of it"),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")]
NumImages = Annotated[
    int | None, typer.Option("--images", help="Images in a row; only for vision models.", show_default="1 for those")
]
ImageSize = Annotated[int, typer.Option(help="Pixels of an image's side.")]
Update = Annotated[str, typer.Option(help="after-step (needed for clipping), or in-backward: faster, and less memory.")]


def require_file(option: str, path: Path | None) -> None:
    """Fail before the work if its result could not be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = f"{path} is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(f"{option}: {found}. Name a file in an existing folder.")


def update_mode(update: str) -> Literal["after_step", "in_backward"]:
    modes: dict[str, Literal["after_step", "in_backward"]] = {"after-step": "after_step", "in-backward": "in_backward"}
    return modes[require_one_of(modes, update, "--update")]


def _plan_options(
    model: ConfigPath,
    hardware: Hardware = "rtx4090",
    sequence_len: SequenceLen = 2048,
    micro_batch_size: MicroBatch = None,
    batch_size: BatchSize = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    accumulate: Accumulate = None,
    dtype: Dtype = "bfloat16",
    update: Update = "after-step",
    images: NumImages = None,
    image_size: ImageSize = 1024,
) -> None: ...


def planning(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a forecast beside its own.

    The command is called with `model`, `hardware`, its own options, and `forecast`: a function that plans for the
    machine of that name. torch is imported when `forecast` is first called.
    """
    shared = inspect.signature(_plan_options).parameters
    own = {name: param for name, param in inspect.signature(command).parameters.items() if name != "forecast"}

    def run(**given: Any) -> None:
        mode = update_mode(given["update"])

        def forecast(hardware: str) -> "Forecast":
            from outsize.forecast.forecast import ForecastRequest
            from outsize.forecast.forecast import forecast as make
            from outsize.optim.names import default_spec

            settings = {name: given[name] for name in shared if name not in ("model", "hardware", "update")}
            request = ForecastRequest(hardware=hardware, optimizer=default_spec(update=mode), **settings)
            return make(given["model"], request)

        command(forecast=forecast, **{name: given[name] for name in own})

    parameters = {**shared, **own}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: param.annotation for name, param in parameters.items()}
    return run
