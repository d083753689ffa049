"""`outsize explain`: compares a plan with common ones, and shows what a better machine would gain."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from outsize.cli.options import ConfigPath, Hardware, planning

if TYPE_CHECKING:
    from outsize.forecast.forecast import Forecast


@planning
def explain(model: ConfigPath, forecast: "Callable[[str], Forecast]", hardware: Hardware = "rtx4090") -> None:
    """Why this plan and no other? What would more memory or a faster machine be worth?
    Needs a model's config alone, and some seconds.

    [bold]Examples[/bold]

    outsize explain ~/models/llama-8b --hardware rtx4090 --sequence-len 4096

    outsize explain ~/models/llama-8b --hardware h200 --gpu-memory 24GiB --update in-backward
    """
    made = forecast(hardware)
    print(made)
    print(f"\n{made.explain()}")
