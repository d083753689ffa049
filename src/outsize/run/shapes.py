"""Models by name for `outsize bench`: the configs of real models, without weights. Imports neither torch nor
transformers.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from outsize.base.errors import ConfigError

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def sizes(*values: int) -> dict[str, Any]:
    """Keys of a config: hidden size, intermediate size, layers, attention heads, key-value heads."""
    return dict(zip(_SIZES, values, strict=True))


def rope(theta: float, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": dict(rope_type="default", rope_theta=theta) | others}


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return rope(500000.0, rope_type="llama3", **scaling)


_UNTIED = {"tie_word_embeddings": False}
_LLAMA = dict(model_type="llama", rms_norm_eps=1e-5, vocab_size=128256, max_position_embeddings=131072) | _UNTIED
_LLAMA_31, _LLAMA_32 = _LLAMA | _llama3_rope(8.0), _LLAMA | _llama3_rope(32.0) | {"tie_word_embeddings": True}
_QWEN3 = dict(model_type="qwen3", rms_norm_eps=1e-6, vocab_size=151936, max_position_embeddings=40960, head_dim=128)
_QWEN3 |= _UNTIED | rope(1000000.0)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA | sizes(128, 352, 6, 4, 2) | dict(vocab_size=1024, max_position_embeddings=2048),
    "llama-1b": _LLAMA_32 | sizes(2048, 8192, 16, 32, 8),
    "llama-3b": _LLAMA_32 | sizes(3072, 8192, 28, 24, 8),
    "llama-7b": _LLAMA | sizes(4096, 11008, 32, 32, 32) | dict(vocab_size=32000, max_position_embeddings=4096),
    "llama-8b": _LLAMA_31 | sizes(4096, 14336, 32, 32, 8),
    "llama-70b": _LLAMA_31 | sizes(8192, 28672, 80, 64, 8),
    "qwen3-8b": _QWEN3 | sizes(4096, 12288, 36, 32, 8),
    "qwen3-14b": _QWEN3 | sizes(5120, 17408, 40, 40, 8),
    "qwen3-32b": _QWEN3 | sizes(5120, 25600, 64, 64, 8),
}


def require_one_of(names: Iterable[str], given: str, option: str) -> str:
    """`given`, if it is one of the names. Otherwise an error that suggests the closest one."""
    known = list(names)
    if given not in known:
        near = difflib.get_close_matches(given.lower().replace("_", "-"), known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{option} {given!r} is unknown.{hint} Choose one of {', '.join(known)}.")
    return given


def shape_config(shape: dict[str, Any], *, seq: int = 0) -> Any:
    """The transformers config of a shape, with at least `seq` positions."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**shape, use_cache=False)
    text = config.get_text_config()
    text.max_position_embeddings = max(text.max_position_embeddings, seq)
    return config
