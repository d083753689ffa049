"""Trains the small model that examples/prune.py prunes, a Llama on bytes, and saves it to examples/byte_teacher.

Its data are the sources of Python's standard library, which every machine has. Takes about 20 minutes on one core:

    OMP_NUM_THREADS=1 python tools/byte_teacher.py
"""

import math
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "byte_teacher"
ROWS, TOKENS, STEPS, WARMUP, RATE = 32, 128, 1200, 60, 4e-3


def texts() -> list[str]:
    """The modules of the standard library, without tests and tables, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "encodings", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    paths = [path for path in folder.rglob("*.py") if not left_out & set(path.relative_to(folder).parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)]


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


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=6,
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


def main() -> None:
    train, held_out = rows()
    model = new_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {train.numel():,} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = _generator()
    for step in range(STEPS):
        share = max(0.0, (step - WARMUP) / (STEPS - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * (0.05 + 0.475 * (1 + math.cos(math.pi * share)))
        batch = train[torch.randint(0, len(train), (ROWS,), generator=generator)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss_of(model, held_out[:128]):.4f}", flush=True)
            sys.stdout.flush()
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer().save_pretrained(FOLDER)
    print(f"loss {loss_of(model, held_out):.4f}; saved to {FOLDER}")


if __name__ == "__main__":
    main()
