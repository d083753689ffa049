"""Prints the table of docs/hardware.md: what common GPUs can train, as `outsize plan` predicts it.

    PYTHONPATH=src python -m tools.hardware_table

Takes a few minutes. Rates are those of the catalog: measured for the H200, estimated for the others.
"""

import logging

import peft

import outsize
from outsize.base.errors import PlanInfeasible
from outsize.run.shapes import SHAPES, shape_config

GPUS = (("rtx3090", 12, 64), ("rtx4090", 16, 64), ("rtx4090", 24, 128), ("l40s", 48, 256), ("h100", 80, 256))
"""Machine of the catalog, GiB of GPU memory, GiB of RAM, of which a tenth is left free."""
FULL, LORA = ("llama-1b", "llama-3b", "llama-8b", "qwen3-14b"), ("llama-8b", "qwen3-14b", "qwen3-32b")
ROWS, TOKENS = 4, 2048
GiB = 2**30


def cell(model: str, machine: str, gib: int, ram: int, *, lora: bool) -> str:
    adapter = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    try:
        made = outsize.plan(
            shape_config(SHAPES[model], seq=TOKENS), sequence_len=TOKENS, micro_batch_size=ROWS, hardware=machine,
            gpu_memory=f"{gib}GiB", host_memory=int(0.9 * ram * GiB), peft_config=adapter,
        )  # fmt: skip
    except PlanInfeasible as error:
        what = "RAM" if error.resource == "host" else "GPU memory"
        return f"needs {error.needed_bytes / GiB / (0.9 if error.resource == 'host' else 1):.0f} GiB of {what}"
    return f"{ROWS * TOKENS / made.plan.estimate.step_seconds:,.0f}"


def main() -> None:
    logging.disable(logging.WARNING)
    names = [*(f"{name}, full" for name in FULL), *(f"{name}, LoRA" for name in LORA)]
    print("| GPU memory (rates of), RAM | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for machine, gib, ram in GPUS:
        cells = [cell(model, machine, gib, ram, lora=False) for model in FULL]
        cells += [cell(model, machine, gib, ram, lora=True) for model in LORA]
        print(f"| {gib} GiB ({machine}), {ram} GiB | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
