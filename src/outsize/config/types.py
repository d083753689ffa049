"""The types of settings: a type and the rule that its values satisfy.

`micro_batch_size: Count = 1` is all that a key needs. For a type checker `Count` is `int`; `base.records.Reader` also
checks the rule.
"""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from outsize.base.records import Rule
from outsize.base.units import parse_bytes
from outsize.model.strategies import STRATEGIES
from outsize.optim.names import OPTIMIZERS


def _is_share_or_count(value: float) -> bool:
    return 0 <= value < 1 or (isinstance(value, int) and value >= 1)


def _is_size(value: str | int) -> bool:
    return parse_bytes(value, name="") > 0


Text = Annotated[str, Rule(expected="a non-empty string", holds=bool)]
Count = Annotated[int, Rule(expected="a positive integer", holds=lambda value: value >= 1)]
CountFromZero = Annotated[int, Rule(expected="a non-negative integer", holds=lambda value: value >= 0)]
Seed = Annotated[int, Rule(expected="an integer from 0 to 4294967295", holds=lambda value: 0 <= value < 2**32)]
"""The range of numpy, the narrowest of the generators."""
Positive = Annotated[float, Rule(expected="a positive number", holds=lambda value: value > 0)]
NotNegative = Annotated[float, Rule(expected="a non-negative number", holds=lambda value: value >= 0)]
Share = Annotated[float, Rule(expected="a number from 0 to 1", holds=lambda value: 0 <= value <= 1)]
ShareBelowOne = Annotated[float, Rule(expected="a number from 0 to below 1", holds=lambda value: 0 <= value < 1)]
ShareOrCount = Annotated[
    float | int, Rule(expected="a fraction below 1 or a number of examples", holds=_is_share_or_count)
]
Warmup = Annotated[
    float | int, Rule(expected="a number of steps, or a share of all steps below 1", holds=_is_share_or_count)
]
CountOrShare = Annotated[
    float | int,
    Rule(
        expected="a number of steps, or a share of all steps below 1",
        holds=lambda value: value != 0 and _is_share_or_count(value),
    ),
]
Size = Annotated[str | int, Rule(expected="a size such as '24GiB' or a number of bytes", holds=_is_size)]

# YAML 1.1 reads a bare `no` as false.
SaveStrategy = Annotated[Literal["no", "steps", "epoch"], Rule(also=((False, "no"),))]
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
if TYPE_CHECKING:
    _OptimizerName = str
else:
    _OptimizerName = Literal[tuple(OPTIMIZERS)]
Optimizer = Annotated[
    _OptimizerName,
    Rule(
        expected=f"one of {', '.join(OPTIMIZERS)}",
        also=tuple((other, name) for name, (_, others) in OPTIMIZERS.items() for other in others),
    ),
]
SdpKernel = Literal["auto", "flash", "cudnn", "efficient", "math"]
"""`auto`, or a kernel of device/sdp_kernel.py."""
ActivationOffloading = Annotated[
    Literal["auto", "true", "false", "legacy", "disk", "hidden_states"], Rule(also=((True, "true"), (False, "false")))
]
Adapter = Annotated[Literal["lora", "osft"], Rule(expected="lora or osft, or qlora with load_in_4bit: true")]
ComputeDtype = Annotated[
    Literal["bfloat16", "float16", "float32"],
    Rule(
        expected="bfloat16, float16 or float32",
        convert=lambda value: value.removeprefix("torch.") if isinstance(value, str) else value,
        also=(("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")),
    ),
]
Bf16 = Annotated[bool, Rule(also=(("auto", True), ("full", True)))]
Tf32 = Annotated[bool | None, Rule(also=(("auto", None),))]
ImageSize = Annotated[
    tuple[Count, ...],
    Rule(
        expected="pixels of a side, or [width, height]",
        convert=lambda value: [value] if isinstance(value, int) else value,
        holds=lambda value: len(value) in (1, 2),
    ),
]
SpecialToken = Literal["bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens"]
Trackers = Annotated[
    tuple[Text, ...], Rule(expected="a list of trackers such as [wandb, tensorboard]", also=(("none", ()),))
]
TargetModules = Annotated[
    tuple[Text, ...] | str, Rule(expected="a list of module names, or a regex of whole names", holds=bool)
]
DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
"""The losses of TRL's DPOTrainer."""
PAIR_TYPES = (
    "chat_template.argilla_chat",
    *(f"{style}.{form}" for style in ("chatml", "llama3")
      for form in ("default", "argilla_chat", "icr", "intel", "prompt_pairs", "ultra")),
)  # fmt: skip
"""The formats of preference pairs alone (data/preference.py)."""
TextType = Literal[
    "completion",
    "pretrain",
    "chat_template",
    "chat_template.default",
    "sharegpt",
    "prompt_completion",
    "input_output",
    "alpaca",
    "alpaca:instruct",
    "alpaca:chat",
    "alpaca:chatml",
    "alpaca:phi",
    "alpaca_instruct",
    "alpaca_instruct.load_no_prompt",
    "alpaca_chat",
    "alpaca_chat.load_no_prompt",
    "alpaca_w_system",
    "alpaca_w_system.load_instruct",
    "alpaca_w_system.load_chat",
    "alpaca_w_system.load_open_orca",
    "gpteacher",
]
"""The formats of data/formats.py."""
if TYPE_CHECKING:
    DatasetType = str
else:
    DatasetType = Literal[(*get_args(TextType), *PAIR_TYPES)]
PromptKey = Literal[
    "system_prompt",
    "field_system",
    "field_instruction",
    "field_input",
    "field_output",
    "format",
    "no_input_format",
    "system_format",
    "field_prompt",
    "field_chosen",
    "field_rejected",
    "prompt_format",
    "chosen_format",
    "rejected_format",
]
PAIR_KEYS = {f"field_{name}" for name in ("prompt", "chosen", "rejected")} | {
    f"{name}_format" for name in ("prompt", "chosen", "rejected")
}
"""Those of preference pairs alone."""
Checkpoint = Annotated[
    str | bool, Rule(expected="the folder of a checkpoint or true for the newest one", holds=lambda value: value != "")
]
PlanFile = Annotated[str, Rule(expected="the path of a plan file or a mapping of pins", holds=bool)]
if TYPE_CHECKING:
    PinName = str
else:
    PinName = Literal[
        ("n_persist", "n_buffer", *(s.pin for s in STRATEGIES if s.pin), "n_optimizer_gpu", "n_optimizer_streamed")
    ]
"""The fields of `Pins` (schedule/pins.py)."""
