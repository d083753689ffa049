"""Small things on disk for whole runs: a model's folder with a real tokenizer, data, and a YAML that trains them."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "that",
    "dog",
    "ran",
    "far",
    "away",
    "from",
    "home",
    "while",
    "rain",
    "fell",
    "over",
    "hills",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(folder: Path, *, pad: bool = True) -> PreTrainedTokenizerFast:
    special = ["</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: zoo.VOCAB - len(special)]
    for letter in "Ġabcdefghijklmnopqrstuvwxyz.,!?0123456789":
        if letter not in letters:
            letters[
                letters.index(
                    next(x for x in reversed(letters) if x not in "Ġabcdefghijklmnopqrstuvwxyz.,!?0123456789")
                )
            ] = letter
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        pad_token="<pad>" if pad else None,
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> nn.Module:
    model = zoo.make(kind, dtype)
    model.save_pretrained(folder, **settings)
    return model


def sentences(count: int, *, words: int = 6) -> list[str]:
    rng = torch.Generator().manual_seed(11)
    return [
        " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (words + n % 5,), generator=rng)) for n in range(count)
    ]


def write_text(path: Path, count: int = 40) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(count)))
    return path


def write_chat(path: Path, count: int = 40) -> Path:
    texts = sentences(2 * count, words=2)
    chats = [
        [{"role": "user", "content": texts[2 * i]}, {"role": "assistant", "content": texts[2 * i + 1]}]
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def write_run(folder: Path, *, kind: str = "llama", chat: bool = False, **keys: Any) -> Path:
    """A model, its tokenizer, data and run.yaml below `folder`; returns the YAML."""
    model = folder / "model"
    if not model.exists():
        write_model(model, kind)
        write_tokenizer(model)
    data = write_chat(folder / "data.jsonl") if chat else write_text(folder / "data.jsonl")
    settings = {
        "base_model": str(model),
        "datasets": [str(data)],
        "sequence_len": 48,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "output_dir": str(folder / "out"),
        "device": "cpu",
        "chunk_bytes": "8KiB",
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**settings, **keys}, sort_keys=False))
    return path
