"""The kinds of values a key can have: a type with the rule that its values keep.

`micro_batch_size: Count = 1` says all there is to say about a key. For a type checker `Count` is `int`; `values.py`
reads the rule as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from outsize.base.units import parse_bytes
from outsize.model.strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    expected: str
    """What the value is, in words: the first half of every complaint about it."""
    holds: Callable[[Any], bool] = lambda value: True
    """Whether a value of the right type keeps the rule. May raise a ConfigError that says more than `expected` does."""
    also: tuple[tuple[Any, Any], ...] = ()
    """Other ways to write a value, as (written, meant)."""


def _is_share_or_count(value: float) -> bool:
    return 0 <= value < 1 or (isinstance(value, int) and value >= 1)


def _is_size(value: str | int) -> bool:
    return parse_bytes(value, name="it") > 0


Text = Annotated[str, Rule(expected="a text that is not empty", holds=bool)]
Count = Annotated[int, Rule(expected="a whole number from 1", holds=lambda value: value >= 1)]
CountFromZero = Annotated[int, Rule(expected="a whole number from 0", holds=lambda value: value >= 0)]
Seed = Annotated[int, Rule(expected="a whole number from 0 to 4294967295", holds=lambda value: 0 <= value < 2**32)]
"""What numpy takes as a seed, the narrowest of the generators."""
Positive = Annotated[float, Rule(expected="a number above 0", holds=lambda value: value > 0)]
NotNegative = Annotated[float, Rule(expected="a number from 0", holds=lambda value: value >= 0)]
Share = Annotated[float, Rule(expected="a number from 0 to 1", holds=lambda value: 0 <= value <= 1)]
ShareBelowOne = Annotated[float, Rule(expected="a number from 0 to below 1", holds=lambda value: 0 <= value < 1)]
ShareOrCount = Annotated[
    float | int, Rule(expected="a share from 0 to below 1, or a whole number of examples", holds=_is_share_or_count)
]
Size = Annotated[str | int, Rule(expected="a size such as '24GiB', or a number of bytes", holds=_is_size)]

# YAML 1.1 reads a bare `no` as false.
SaveStrategy = Annotated[Literal["no", "steps", "epoch"], Rule(expected="no, steps or epoch", also=((False, "no"),))]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
Optimizer = Annotated[
    Literal["adamw"],
    Rule(
        expected="adamw (outsize has AdamW with exact fp32 masters, wherever they live)",
        also=(("adamw_torch", "adamw"), ("adamw_torch_fused", "adamw"), ("adamw_hf", "adamw")),
    ),
]
Adapter = Annotated[Literal["lora"], Rule(expected="lora (base weights stay as they are, not quantised)")]
Bf16 = Annotated[bool, Rule(expected="true or false", also=(("auto", True),))]
Trackers = Annotated[
    tuple[Text, ...], Rule(expected="a list of trackers such as [wandb, tensorboard]", also=(("none", ()),))
]
TargetModules = Annotated[
    tuple[Text, ...],
    Rule(
        expected="a list of module names (for all linear layers: lora_target_linear: true)",
        holds=lambda names: "all-linear" not in names,
    ),
]
Checkpoint = Annotated[
    str | bool, Rule(expected="the folder of a checkpoint, or true for the newest one", holds=lambda value: value != "")
]
PlanFile = Annotated[str, Rule(expected="the path of a plan file, or a mapping of pins", holds=bool)]
if TYPE_CHECKING:
    PinName = str
else:
    PinName = Literal[("n_persist", "n_buffer", *(s.pin for s in STRATEGIES if s.pin), "n_optimizer_gpu")]
"""The fields of `Pins` (plan/pins.py)."""
