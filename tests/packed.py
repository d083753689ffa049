"""Packed batches and models whose attention knows documents by their offsets."""

from typing import Any

import numpy as np
import torch
import transformers
import zoo
from torch import Tensor, nn

from outsize.data.collate import Collator
from outsize.data.packing import lay_out
from outsize.model.packed_attention import VARLEN, register

WINDOW = 6
KINDS = ("llama", "qwen3", "gemma3", "mistral", "mixtral")


def model(kind: str, dtype: torch.dtype = torch.float32, attention: str = VARLEN) -> nn.Module:
    """The zoo's model, or one whose window is shorter than documents."""
    register()
    made: Any
    if kind in zoo.KINDS:
        made = zoo.make(kind, dtype)
    else:
        some = dict(zoo._DECODER, vocab_size=zoo.VOCAB, use_cache=False, sliding_window=WINDOW)
        config: Any
        if kind == "gemma3":
            layers = ["sliding_attention", "full_attention"] * 2
            config = transformers.Gemma3TextConfig(**some, layer_types=layers, query_pre_attn_scalar=8)
        else:
            config = transformers.MistralConfig(**some)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    made.config._attn_implementation = attention
    return made


def documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, zoo.VOCAB, (length,), generator=rng) for length in lengths]


def batch(*rows: list[Tensor], boundaries: bool = True) -> dict[str, Any]:
    """Rows of documents, of equal length."""
    made = [
        lay_out(
            [dict.fromkeys(("input_ids", "labels"), np.asarray(one, dtype=np.int32)) for one in row],
            sequence_len=sum(map(len, rows[0])),
            pad_id=0,
        )
        for row in rows
    ]
    return Collator(0, None, boundaries)(made)
