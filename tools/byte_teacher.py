"""Trains the small model that examples/prune.py prunes, a Llama on bytes, and saves it to examples/byte_teacher.

Its data are the sources of Python's standard library (3.11 for the one that is there), which every machine has. It
reached a loss of 1.3494 nats per byte on 512 held-out rows. Takes about two minutes of one core:

    OMP_NUM_THREADS=1 python tools/byte_teacher.py
"""

import sysconfig
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "byte_teacher"
ROWS, TOKENS, STEPS, WARMUP = 16, 128, 400, 40


def texts() -> list[str]:
    """Modules of the standard library, without tests, tables and those that examples/prune.py holds out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "encodings", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    paths = [path for path in folder.rglob("*.py") if not left_out & set(path.relative_to(folder).parts)]
    measured_on = sorted(folder.glob("*.py"))[::8]
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted({*paths} - {*measured_on})]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, in the order of the bytes. Byte 0 ends a text."""
    letters = _byte_letters()
    inner = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=letters[0], pad_token=letters[0])


def _byte_letters() -> list[str]:
    """How `ByteLevel` writes each byte: printable ones as they are, others as letters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, tokens) to train on, and to evaluate on."""
    data = b"\0".join(text.encode() for text in texts())
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    count = len(flat) // TOKENS
    shuffled = flat[: count * TOKENS].view(count, TOKENS)[torch.randperm(count, generator=_generator())]
    return shuffled[512:], shuffled[:512]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def new_model(hidden: int = 128, layers: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


@torch.no_grad()
def loss_of(model: nn.Module, data: torch.Tensor) -> float:
    losses = [model(input_ids=part, labels=part, use_cache=False).loss for part in data.split(64)]
    return float(torch.stack(losses).mean())


def learning_rate(step: int, steps: int) -> float:
    """As a share of the highest: warm-up, constant, and falling to zero in the last 40 % of the steps."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (0.4 * steps))


def new_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices that multiply hidden states. It reached a loss of 2.35 after 100,000 tokens, AdamW 2.33 after
    410,000.
    """
    params = dict(model.named_parameters())
    matrices = [param for name, param in params.items() if param.ndim == 2 and "embed" not in name]
    others = [param for name, param in params.items() if param.ndim < 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, folder: Path, steps: int = STEPS) -> None:
    """Train and save a model."""
    data, held_out = rows()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {data.numel():,} tokens")
    optimizers = new_optimizers(model)
    factor = partial(learning_rate, steps=steps)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in optimizers]
    generator = _generator()
    for step in range(steps):
        batch = data[torch.randint(0, len(data), (ROWS,), generator=generator)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss_of(model, held_out[:64]):.4f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    print(f"loss {loss_of(model, held_out):.4f}; saved to {folder}")


if __name__ == "__main__":
    train(new_model(), FOLDER)
