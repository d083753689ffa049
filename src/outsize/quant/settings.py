"""How a model's linear layers are quantized."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outsize.base.errors import ConfigError

QUANT_TYPES = ("nf4", "fp4")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The names and meanings are those of transformers' BitsAndBytesConfig; the defaults are QLoRA's."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    """int8 weights with a scale per row."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = True
    """Whether the scales of the blocks are quantized too."""
    bnb_4bit_compute_dtype: str | None = None
    """Dtype of the matrix products. None: the model's."""
    llm_int8_skip_modules: tuple[str, ...] = ()
    """Modules that are not quantized, beside the output head: their names, or the ends of these."""

    def __post_init__(self) -> None:
        if self.load_in_4bit == self.load_in_8bit:
            found = "both are true. Remove one of them" if self.load_in_4bit else "neither is true. Set one of them"
            raise ConfigError(f"load_in_4bit, load_in_8bit: {found}.")
        if self.bnb_4bit_quant_type not in QUANT_TYPES:
            raise ConfigError(f"bnb_4bit_quant_type: {self.bnb_4bit_quant_type!r} is unknown. Use nf4 or fp4.")
        if self.bnb_4bit_compute_dtype not in (None, *COMPUTE_DTYPES):
            raise ConfigError(
                f"bnb_4bit_compute_dtype: {self.bnb_4bit_compute_dtype!r} is not a dtype of matrix products. Use "
                f"{', '.join(COMPUTE_DTYPES)}, or remove it."
            )


def stored_quantization(section: Mapping[str, Any]) -> Quantization | None:
    """The quantization of a folder by bitsandbytes; None: by another method. `section`: its `quantization_config`."""
    in_4bit, in_8bit = bool(section.get("load_in_4bit")), bool(section.get("load_in_8bit"))
    if in_4bit == in_8bit:
        return None
    return Quantization(
        load_in_4bit=in_4bit,
        load_in_8bit=in_8bit,
        bnb_4bit_quant_type=section.get("bnb_4bit_quant_type", "fp4"),
        bnb_4bit_use_double_quant=bool(section.get("bnb_4bit_use_double_quant")),
        bnb_4bit_compute_dtype=section.get("bnb_4bit_compute_dtype") if in_4bit else None,
        llm_int8_skip_modules=tuple(section.get("llm_int8_skip_modules") or ()),
    )
