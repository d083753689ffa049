"""How to load the result of a run, and the model card of an adapter."""

from typing import Any

from transformers import ProcessorMixin

from outsize.config.run import RunConfig
from outsize.model.build import absolute_if_local

_SETTINGS = (
    "learning_rate", "lr_scheduler", "num_epochs", "max_steps", "micro_batch_size", "gradient_accumulation_steps",
    "sequence_len", "optimizer", "seed",
)  # fmt: skip


def how_to_load(result: str, config: RunConfig, model_class: str, processor: Any = None) -> list[str]:
    """Lines of Python. `model_class`: the name of the model's class, without an adapter. `processor`: what made the
    rows, a tokenizer or a processor.
    """
    name = "AutoModelForCausalLM" if model_class.endswith("ForCausalLM") else model_class
    code = ", trust_remote_code=True" if model_class.startswith("Pruned") else ""  # the folder's modeling_pruned.py
    if config.quantization is not None:
        code += f", quantization_config=BitsAndBytesConfig({_arguments(config)})"
    load = lambda source: f'{name}.from_pretrained("{source}", dtype="auto"{code})'
    auto, variable = (
        ("AutoProcessor", "processor") if isinstance(processor, ProcessorMixin) else ("AutoTokenizer", "tokenizer")
    )
    tokenizer = f'{variable} = {auto}.from_pretrained("{result}")'
    if config.adapter != "lora":
        return [f"from transformers import {name}, {auto}", f"model = {load(result)}", tokenizer]
    quantized = ", BitsAndBytesConfig" if config.quantization is not None else ""
    return [
        f"from peft import PeftModel; from transformers import {name}, {auto}{quantized}",
        f"base = {load(absolute_if_local(config.base_model))}",
        f'model = PeftModel.from_pretrained(base, "{result}")',
        tokenizer,
    ]


def _arguments(config: RunConfig) -> str:
    """Of transformers' BitsAndBytesConfig."""
    if config.load_in_8bit:
        found: dict[str, Any] = {"load_in_8bit": True}
    else:
        names = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        found = {name: getattr(config, name) for name in names}
        dtype = config.bnb_4bit_compute_dtype or ("bfloat16" if config.bf16 else "float32")
        found["bnb_4bit_compute_dtype"] = dtype
    if config.llm_int8_skip_modules:
        found["llm_int8_skip_modules"] = ["lm_head", *config.llm_int8_skip_modules]
    return ", ".join(f"{name}={value!r}" for name, value in found.items())


def adapter_card(config: RunConfig, settings: dict[str, object], model_class: str, processor: Any = None) -> str:
    """README.md of a LoRA adapter, in place of PEFT's empty form. `settings`: PEFT's, beside those of the run."""
    base = absolute_if_local(config.base_model)
    head = ["---", *([] if base.startswith("/") else [f"base_model: {base}"]), "library_name: peft", "---"]
    values = {**settings, **{name: getattr(config, name) for name in _SETTINGS}}
    rows = [f"| `{name}` | {value} |" for name, value in values.items() if value is not None]
    data = ", ".join(f"`{dataset.path}`" for dataset in config.datasets)
    code = ["```python", *how_to_load("path/to/this/folder", config, model_class, processor), "```"]
    return "\n".join(
        [*head, "", "# LoRA adapter", "", f"Of `{base}`, trained on {data} with outsize.", "", "| setting | value |",
         "|---|---|", *rows, "", *code, ""]
    )  # fmt: skip
