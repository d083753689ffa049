"""`make train`: the whole engine in under three minutes, without a download. A small Llama learns the text beside this file, byte by byte.

First one plain PyTorch step is watched to see what it takes. Then the same model is prepared with at most 40 % of that: on the GPU if there is
one, else on `sim`, which computes on the CPU and refuses to go over its budget. The seed is fixed: the same losses, the same words at the end.
"""

import copy
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from outsize.base.units import exact_bytes, show_bytes
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.plan.render import render
from outsize.reference import AdamW as Reference
from outsize.runtime.engine import Engine
from outsize.runtime.optimizer import AdamW
from outsize.train.build import prepare

STEPS = 200
SHARE = 0.4
"""Of what a plain step takes: the budget."""
PROMPT = "The words of the wise"
SPEC = AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)


@dataclass(frozen=True, slots=True)
class Size:
    rows: int
    tokens: int


SIZES = {"cpu": Size(3, 128), "cuda": Size(32, 256)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    losses: list[float]
    sample: str
    plain_bytes: int
    """Peak of a plain PyTorch step."""
    budget_bytes: int
    planned_bytes: int
    peak_bytes: int

    @property
    def kept(self) -> bool:
        return self.peak_bytes <= self.budget_bytes <= SHARE * self.plain_bytes


def main(steps: int = STEPS, *, sample_bytes: int = 160, console: Console | None = None) -> Outcome:
    console = console or Console(width=None if sys.stdout.isatty() else 104)
    started = time.perf_counter()
    here = choose_device()
    size = SIZES[here.kind]
    if here.kind == "cpu":
        # Sums depend on the number of threads, so this gives every machine the same losses; and two threads that wait for each other
        # at every small operator are ten times slower than one as soon as another process wants a core.
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model()
    feed = batches(read_text(), size)
    first = next(feed)
    num_params = sum(p.numel() for p in model.parameters())
    plain = plain_peak_bytes(model, first, here)
    budget = int(plain * SHARE) // 2**20 * 2**20
    console.print(f"A Llama of {num_params / 1e6:.1f} M parameters, {size.rows} × {size.tokens} bytes a step.")
    console.print(f"A plain PyTorch step takes {show_bytes(plain)} of device memory. The budget here is {show_bytes(budget)}, {budget / plain:.0%} of that.")
    if here.kind == "cuda":
        engine = prepare(model, first, optimizer=SPEC, device=here, gpu_memory=_with_context(budget, here), chunk_bytes="2MiB")
    else:
        engine = prepare(model, first, optimizer=SPEC, device=f"sim:{exact_bytes(budget)}", chunk_bytes="2MiB")
    try:
        console.print(Panel(render(engine.plan, engine.graph, engine.layout), title="the plan", title_align="left", expand=False))
        losses = train(engine, first, feed, steps, console)
        sample = write_on(model, PROMPT, sample_bytes)
        report = engine.report()
    finally:
        engine.detach()
    outcome = Outcome(
        losses=losses, sample=sample, plain_bytes=plain, budget_bytes=budget, planned_bytes=report.planned_gpu_bytes, peak_bytes=report.gpu_peak_bytes
    )
    show(outcome, console, time.perf_counter() - started)
    return outcome


def build_model() -> nn.Module:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=8, vocab_size=256,
        max_position_embeddings=512, tie_word_embeddings=False, use_cache=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()


def read_text() -> Tensor:
    """The bytes below the file's own heading."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="ascii")
    return torch.tensor(list(text.split("-\n", 1)[1].encode()), dtype=torch.int64)


def batches(text: Tensor, size: Size) -> Iterator[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, len(text) - size.tokens, (size.rows,), generator=rng)
        ids = torch.stack([text[s : s + size.tokens] for s in starts.tolist()])  # (rows, tokens)
        yield {"input_ids": ids, "labels": ids.clone()}


def plain_peak_bytes(model: nn.Module, batch: dict[str, Tensor], device: Device) -> int:
    """What the usual loop holds at most: everything on the device, the same optimizer, no outsize. By the meter that also watches the engine."""
    with device.meter() as meter:
        twin = copy.deepcopy(model).to(device.torch_device)
        optimizer = Reference(twin.parameters(), lr=SPEC.lr, betas=SPEC.betas, weight_decay=SPEC.weight_decay, max_grad_norm=SPEC.max_grad_norm)
        for _ in range(2):  # the first one makes the optimizer's state
            out = twin(**{name: tensor.to(device.torch_device) for name, tensor in batch.items()})
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = meter.peak()
        del twin, optimizer, out
    gc.collect()
    return peak


def _with_context(budget: int, device: Device) -> int:
    """`gpu_memory` counts the CUDA context too; what is lost beside it depends on the limit itself, so this is approached."""
    total = budget
    for _ in range(4):
        device.limit(total)
        total = budget + device.overhead_bytes
    return total


def train(engine: Engine, first: dict[str, Tensor], feed: Iterator[dict[str, Tensor]], steps: int, console: Console) -> list[float]:
    warm_up = max(1, steps // 20)
    schedule = LambdaLR(engine.optimizer, lambda step: min((step + 1) / warm_up, 1.0) * (1.0 - 0.9 * step / max(1, steps)))
    losses: list[float] = []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
               TextColumn("{task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps, loss=float("nan"), speed=0.0)
        started, batch = time.perf_counter(), first
        for step in range(steps):
            out = engine.model(**batch)
            out.loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            schedule.step()
            losses.append(float(out.loss.detach()))
            tokens = (step + 1) * batch["input_ids"].numel()
            progress.update(bar, advance=1, loss=losses[-1], speed=tokens / (time.perf_counter() - started))
            batch = next(feed)
    return losses


@torch.no_grad()
def write_on(model: nn.Module, prompt: str, num_bytes: int, temperature: float = 0.6) -> str:
    """Between steps a prepared model generates like any other; its weights are brought as its layers run."""
    rng = torch.Generator().manual_seed(2)
    text = list(prompt.encode())
    for _ in range(num_bytes):
        logits = model(input_ids=torch.tensor([text[-128:]])).logits[0, -1].float().cpu()  # (vocab,)
        text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=rng)))
    return bytes(text).decode("ascii", errors="replace")


def show(outcome: Outcome, console: Console, seconds: float) -> None:
    last = outcome.losses[-max(1, len(outcome.losses) // 10) :]
    console.print(Panel(outcome.sample, title="what it writes", title_align="left", expand=False), markup=False)
    console.print(f"loss       {outcome.losses[0]:.3f} to {sum(last) / len(last):.3f} in {len(outcome.losses)} steps")
    console.print(f"peak       {show_bytes(outcome.peak_bytes)} ({outcome.peak_bytes} bytes; planned {outcome.planned_bytes})")
    console.print(f"budget     {show_bytes(outcome.budget_bytes)}: {'kept' if outcome.peak_bytes <= outcome.budget_bytes else '[red]exceeded[/red]'}")
    console.print(f"plain run  {show_bytes(outcome.plain_bytes)}: this one took {outcome.peak_bytes / outcome.plain_bytes:.0%} of it")
    console.print(f"time       {seconds:.0f} s in all")


if __name__ == "__main__":
    sys.exit(0 if main().kept else 1)
