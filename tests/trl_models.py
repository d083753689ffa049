"""A tokenizer, a model and rows for TRL's trainers, small enough for a test."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and chatml."""
    inner = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = CHATML
    return made


def llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, scores: bool = False) -> Any:
    """`scores`: a reward model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=259,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=96,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=257,
            **({"num_labels": 1} if scores else {}),
        )
        kind: Any = LlamaForSequenceClassification if scores else LlamaForCausalLM
        made: nn.Module = kind._from_config(config, dtype=dtype)
        return made.train()


def question(letters: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": ("ab" * letters)[:letters]}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def chats(*lengths: int) -> list[dict[str, Any]]:
    return [{"messages": [*question(n), *answer(str(n))]} for n in lengths]


def preferences(count: int = 8, no: str = "no") -> list[dict[str, Any]]:
    return [{"prompt": question(i + 1), "chosen": answer(str(i) * 2), "rejected": answer(no)} for i in range(count)]


def thumbs(count: int = 8) -> list[dict[str, Any]]:
    return [{"prompt": question(i + 1), "completion": answer(str(i) * 2), "label": i % 2 == 0} for i in range(count)]


def prompts(count: int = 8) -> list[dict[str, Any]]:
    return [{"prompt": question(i + 1)} for i in range(count)]


def length_reward(completions: list[Any], **more: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]
