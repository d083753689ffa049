"""`make train`: a whole run in about two minutes, without a download. A small Llama learns the bytes of demo.txt.

First, plain PyTorch steps show how much memory they need. Then `outsize train` runs with at most 40 % of that: on the
GPU if there is one, otherwise on `sim`, which computes on the CPU and enforces the budget. The seed is fixed, so losses
and sample are always the same. The folder it writes holds the model, the data and the run.yaml of an ordinary run.
"""

import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.panel import Panel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outsize.base.units import exact_bytes, show_bytes
from outsize.config.read import read_config
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.reference import AdamW as Reference
from outsize.run.train import train_run

FOLDER = Path("outsize-demo")
STEPS = 200
SHARE = 0.4
"""The budget, as a fraction of the memory of a plain step."""
PROMPT = "The words of the wise"


@dataclass(frozen=True, slots=True)
class Size:
    rows: int
    tokens: int
    dtype: torch.dtype
    """Of the weights. A CPU without bf16 instructions (AMD EPYC, 2 cores) trained 29 tokens/s in bf16, 484 in fp32."""


SIZES = {"cpu": Size(3, 128, torch.float32), "cuda": Size(32, 256, torch.bfloat16)}


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


def main(
    steps: int = STEPS, *, folder: Path = FOLDER, sample_bytes: int = 160, console: Console | None = None
) -> Outcome:
    console = console or Console(width=None if sys.stdout.isatty() else 104)
    started = time.perf_counter()
    here = choose_device()
    size = SIZES[here.kind]
    if not here.is_gpu:
        # Sums depend on the number of threads: one thread gives the same losses everywhere. Two are ten times slower
        # for small operators as soon as another process uses a core.
        torch.set_num_threads(1)
    run = write_run(folder, steps, size)
    plain = plain_peak_bytes(size, here)
    budget = int(plain * SHARE) // 2**20 * 2**20
    console.print(
        f"A Llama of 15.7 M parameters, {size.rows} × {size.tokens} bytes a step; {run} is the run.", highlight=False
    )
    console.print(
        f"A plain PyTorch step takes {show_bytes(plain)} of device memory. The budget here is {show_bytes(budget)}, "
        f"{budget / plain:.0%} of that."
    )
    where = (
        f"gpu_memory={exact_bytes(_with_context(budget, here))}" if here.is_gpu else f"device=sim:{exact_bytes(budget)}"
    )
    done = train_run(read_config(run, [where]), console)
    outcome = Outcome(
        losses=[loss for _, loss in done.losses],
        sample=write_on(folder / "out", PROMPT, sample_bytes),
        plain_bytes=plain,
        budget_bytes=budget,
        planned_bytes=done.planned_gpu_bytes,
        peak_bytes=done.gpu_peak_bytes,
    )
    show(outcome, console, time.perf_counter() - started)
    return outcome


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )


def write_run(folder: Path, steps: int, size: Size) -> Path:
    """Write the run: the model's config and tokenizer, the text, run.yaml."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    llama_config().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(read_text(), encoding="ascii")
    keys = {
        "base_model": str(folder / "model"),
        "reinit_weights": True,
        "datasets": [str(folder / "text.txt")],
        "sequence_len": size.tokens,
        "micro_batch_size": size.rows,
        "bf16": size.dtype is torch.bfloat16,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler": "linear",
        "warmup_steps": max(1, steps // 20),
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "logging_steps": max(1, steps // 20),
        "output_dir": str(folder / "out"),
        "seed": 0,
        "chunk_bytes": "2MiB",
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(keys, sort_keys=False))
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    inner = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def read_text() -> str:
    """The text of demo.txt below its heading."""
    return Path(__file__).with_suffix(".txt").read_text(encoding="ascii").split("-\n", 1)[1]


def plain_peak_bytes(size: Size, device: Device) -> int:
    """Peak memory of a plain loop: everything on the device, the same optimizer, no outsize."""
    ids = torch.arange(size.rows * size.tokens).remainder(256).view(size.rows, size.tokens)
    with torch.random.fork_rng(devices=[]), device.meter() as meter:
        model: nn.Module = (
            LlamaForCausalLM._from_config(llama_config(), dtype=size.dtype).to(device.torch_device).train()
        )
        optimizer = Reference(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        for _ in range(2):  # the first one allocates the optimizer state
            batch: Tensor = ids.to(device.torch_device)
            out = model(input_ids=batch, labels=batch, use_cache=False)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = meter.peak()
        del model, optimizer, out, batch
    gc.collect()
    return peak


def _with_context(budget: int, device: Device) -> int:
    """`gpu_memory` includes the CUDA context. The overhead depends on the limit itself, so this iterates."""
    total = budget
    for _ in range(4):
        device.limit(total)
        total = budget + device.overhead_bytes
    return total


@torch.no_grad()
def write_on(folder: Path, prompt: str, num_bytes: int, temperature: float = 0.6) -> str:
    """Sample from the exported folder with transformers."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        PreTrainedTokenizerFast.from_pretrained(folder),
    )
    rng = torch.Generator().manual_seed(2)
    ids = tokenizer(prompt)["input_ids"]
    for _ in range(num_bytes):
        logits = model(input_ids=torch.tensor([ids[-128:]]), use_cache=False).logits[0, -1].float()  # (vocab,)
        ids.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=rng)))
    return tokenizer.decode(ids)


def show(outcome: Outcome, console: Console, seconds: float) -> None:
    console.print(Panel(outcome.sample, title="what it writes", title_align="left", expand=False), markup=False)
    console.print(
        f"budget     {show_bytes(outcome.budget_bytes)}: "
        f"{'kept' if outcome.peak_bytes <= outcome.budget_bytes else '[red]exceeded[/red]'}"
    )
    console.print(
        f"plain run  {show_bytes(outcome.plain_bytes)}: this one took {outcome.peak_bytes / outcome.plain_bytes:.0%} "
        "of it"
    )
    console.print(f"time       {seconds:.0f} s in all")


if __name__ == "__main__":
    sys.exit(0 if main().kept else 1)
