"""Writes a tiny chat model and data to try outsize with, for `outsize example`. Nothing is downloaded.

`model/` is a Llama of 1 M random weights with a tokenizer and a chat template, as Hugging Face folders have them.
`data.jsonl` has 24 conversations about capitals. Training takes seconds, also on a CPU.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from outsize.base.errors import ConfigError

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Norway": "Oslo", "Egypt": "Cairo", "Peru": "Lima",
    "Japan": "Tokyo", "Kenya": "Nairobi", "Cuba": "Havana", "Iran": "Tehran", "Greece": "Athens", "Poland": "Warsaw",
    "Canada": "Ottawa", "Chile": "Santiago", "Ghana": "Accra", "Iraq": "Baghdad", "Nepal": "Kathmandu",
    "Portugal": "Lisbon", "Finland": "Helsinki", "Sweden": "Stockholm", "Austria": "Vienna", "Hungary": "Budapest",
    "Ireland": "Dublin", "Vietnam": "Hanoi",
}  # fmt: skip
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations() -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": f"The capital of {country} is {city}."},
        ]
        for country, city in CAPITALS.items()
    ]


def write_data(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations()))


def write_model(folder: Path, layers: int = 4) -> None:
    """A model with the same weights every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["user assistant system", *(message["content"] for chat in conversations() for message in chat)]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )
    whole.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=128, intermediate_size=384, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=whole.eos_token_id, pad_token_id=whole.pad_token_id, bos_token_id=None, dtype="bfloat16",
        initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # An adapter leaves the embeddings as they are. With transformers' small random ones it could learn nothing.
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)


def write_example(folder: Path) -> None:
    """Write `model/` and `data.jsonl` into the folder, which has neither."""
    for path in (folder / "model", folder / "data.jsonl"):
        if path.exists():
            raise ConfigError(f"{path}: exists already. Name another folder, or remove it.")
    logging.disable_progress_bar()
    write_model(folder / "model")
    write_data(folder / "data.jsonl")
