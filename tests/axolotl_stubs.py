"""Stand-ins for the models and datasets that Axolotl's example files name: tiny random models of the same architecture
in folders of the same name, and rows with the same columns.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

TOKENS = [
    "<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|end_of_text|>", "<|padding|>", "<|im_start|>", "<|im_end|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {token: i for i, token in enumerate([*TOKENS, *_ALPHABET])}
_SIZE = dict(
    vocab_size=-(-len(VOCABULARY) // 64) * 64, hidden_size=16, num_hidden_layers=2, num_attention_heads=1,
    num_key_value_heads=1, intermediate_size=32, max_position_embeddings=16384, bos_token_id=0, eos_token_id=1,
    pad_token_id=3,
)  # fmt: skip
_MOE = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "falcon": {"new_decoder_architecture": False},
    "stablelm": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "granitemoehybrid": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 16, "mamba_chunk_size": 16,
    },
    "mamba": {"state_size": 4},
    "mistral3": {
        "text_config": {"model_type": "ministral3", "head_dim": 16, **_SIZE},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
            "intermediate_size": 16, "image_size": 32, "patch_size": 16, "head_dim": 16,
        },
    },
    "gemma4_unified": {
        "text_config": {
            "head_dim": 16, **_SIZE, "num_global_key_value_heads": 1, "global_head_dim": 16, "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32,
        },
    },
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 1, "max_seq_len": 16384},
}  # fmt: skip
MODELS = {
    "LiquidAI/LFM2-350M": "lfm2",
    "LiquidAI/LFM2-8B-A1B": "lfm2_moe",
    "tiiuae/falcon-7b": "falcon",
    "EleutherAI/pythia-12b-deduped": "gpt_neox",
    "EleutherAI/pythia-1.4b-deduped": "gpt_neox",
    "Qwen/Qwen1.5-MoE-A2.7B": "qwen2_moe",
    "stabilityai/stablelm-2-1_6b": "stablelm",
    "agentica-org/DeepCoder-14B-Preview": "qwen2",
    "deepcogito/cogito-v1-preview-qwen-14B": "qwen2",
    "Qwen/Qwen3-8B": "qwen3",
    "ibm-granite/granite-4.0-tiny-preview": "granitemoehybrid",
    "state-spaces/mamba-2.8b": "mamba",
    "mistralai/Mistral-7B-v0.1": "mistral",
    "microsoft/phi-1_5": "phi",
    "microsoft/phi-2": "phi",
    "microsoft/Phi-3-mini-4k-instruct": "phi3",
    "microsoft/Phi-3.5-mini-instruct": "phi3",
    "EleutherAI/gpt-neox-20b": "gpt_neox",
    "togethercomputer/RedPajama-INCITE-Chat-3B-v1": "gpt_neox",
    "mosaicml/mpt-7b": "mpt",
    "mistralai/Shieldstral-1.0-3B": "mistral3",
    "google/gemma-4-12B-it": "gemma4_unified",
}
"""All others are llama."""

_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "a",
    "dog",
    "that",
    "ran",
    "far",
    "away",
    "from",
    "home",
    "while",
    "rain",
    "fell",
    "over",
    "the",
    "hills",
]


def _text(number: int) -> str:
    return " ".join(_WORDS[(number + i * i) % len(_WORDS)] for i in range(4 + number % 5))


ROWS = {
    "alpaca": lambda i: {"instruction": _text(i), "input": _text(i + 1) if i % 2 else "", "output": _text(i + 2)},
    "messages": lambda i: {
        "messages": [
            {"role": "user", "content": _text(i)},
            {"role": "assistant", "content": _text(i + 1)},
            {"role": "user", "content": _text(i + 2)},
            {"role": "assistant", "content": _text(i + 3)},
        ]
    },
    "sharegpt": lambda i: {
        "conversations": [{"from": "human", "value": _text(i)}, {"from": "gpt", "value": _text(i + 1)}],
        "source": "a",
    },
    "text": lambda i: {"text": _text(i)},
    "pairs": lambda i: {
        "conversation": [{"role": "user", "content": _text(i)}],
        "chosen": {"role": "assistant", "content": _text(i + 1)},
        "rejected": {"role": "assistant", "content": _text(i + 2)},
    },
}
DATASETS = {
    "fozziethebeat/alpaca_messages_2k_test": "messages",
    "fozziethebeat/alpaca_messages_2k_dpo_test": "pairs",
    "mlabonne/FineTome-100k": "sharegpt",
    "Nanobit/text-shieldstral-2k-test": "messages",
    "allenai/c4": "text",
    "HuggingFaceFW/fineweb-edu": "text",
}
"""All others are alpaca."""


def load_dataset(path: str, name: str | None = None, split: str = "train", **_: Any) -> list[dict[str, Any]]:
    """In place of `datasets.load_dataset`."""
    return [ROWS[DATASETS.get(path, "alpaca")](i) for i in range(60)]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=TOKENS[4:]
    )
    made.chat_template = TEMPLATE
    return made


def write_model(name: str, root: Path) -> None:
    """A model and its tokenizer in the folder that a hub id names below `root`."""
    kind = MODELS.get(name, "llama")
    own = ARCHITECTURES[kind]
    is_composite = "text_config" in own
    config = AutoConfig.for_model(kind, **(own if is_composite else {**_SIZE, **own}))
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(root / name)
    tokenizer().save_pretrained(root / name)
