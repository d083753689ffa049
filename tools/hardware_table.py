"""Prints the table of docs/hardware.md: what common GPUs can train, as `outsize plan` predicts it.

    PYTHONPATH=src python -m tools.hardware_table

Takes a few minutes. Rates are those of the catalog: measured for the H200, estimated for the others.
"""

import logging

import peft

import outsize
from outsize.base.errors import PlanInfeasible
from outsize.run.shapes import SHAPES, shape_config

GPUS = (("rtx3090", 12), ("rtx4090", 16), ("rtx4090", 24), ("l40s", 48), ("h100", 80))
FULL, LORA = ("llama-1b", "llama-3b", "llama-8b", "qwen3-14b"), ("llama-8b", "qwen3-14b", "qwen3-32b")
ROWS, TOKENS = 4, 2048
GiB = 2**30


def cell(model: str, machine: str, gib: int, *, lora: bool) -> str:
    adapter = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    try:
        made = outsize.plan(
            shape_config(SHAPES[model], seq=TOKENS), sequence_len=TOKENS, micro_batch_size=ROWS, hardware=machine,
            gpu_memory=f"{gib}GiB", host_memory="900GiB", peft_config=adapter,
        )  # fmt: skip
    except PlanInfeasible as error:
        return f"needs {error.needed_bytes / GiB:.0f} GiB"
    estimate = made.plan.estimate
    host = (estimate.host_bytes + made.plan.process_overhead.host_bytes) / GiB
    return f"{ROWS * TOKENS / estimate.step_seconds:,.0f} tok/s, {host:.0f} GiB"


def main() -> None:
    logging.disable(logging.WARNING)
    names = [*(f"{name}, full" for name in FULL), *(f"{name}, LoRA" for name in LORA)]
    print("| GPU memory | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for machine, gib in GPUS:
        cells = [cell(model, machine, gib, lora=False) for model in FULL]
        cells += [cell(model, machine, gib, lora=True) for model in LORA]
        print(f"| {gib} GiB ({machine}) | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
