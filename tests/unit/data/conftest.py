"""Small real tokenizers: byte-level BPE as GPT-2, Llama 3 and Qwen have it, with ChatML around messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
LINES = [
    "The sun rises and the sun sets.",
    "All the rivers run into the sea, yet the sea is not full.",
    "user assistant system\n",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ "
    "message['content'] }}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
)


def make_tokenizer(
    template: str | None = CHATML, *, trim_offsets: bool = False, pad: bool = True, eos: bool = True
) -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    special = {**({"eos_token": "<|end|>"} if eos else {}), **({"pad_token": "<|pad|>"} if pad else {})}
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, additional_special_tokens=["<|im_start|>", "<|im_end|>"], **special
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def tokenizer_with() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture(scope="session")
def marked_template() -> str:
    return CHATML_MARKED


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
