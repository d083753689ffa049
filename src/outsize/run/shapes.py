"""Models by name, for benchmarks: the shapes of real ones, without their weights. Importing this loads neither torch
nor transformers.

A shape is what its model's config.json says. Attention, rotary tables and vocabulary are then the real ones, and so are
memory and speed.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from outsize.base.errors import ConfigError, tell


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return dict(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **{
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            **others,
        },
    )


def _llama3_rope(factor: float) -> dict[str, Any]:
    return dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return dict(
        model_type="qwen3",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        max_window_layers=layers,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    )


def _qwen25_vl(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, vocab_size: int, tie_word_embeddings: bool
) -> dict[str, Any]:
    text = dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=128000,
        max_window_layers=layers,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tie_word_embeddings,
        use_cache=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[16, 24, 24]),
    )
    vision = dict(
        depth=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        out_hidden_size=hidden,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
    )
    return dict(
        model_type="qwen2_5_vl",
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tie_word_embeddings,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
    )


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(128, 352, 6, 4, 2, vocab_size=1024, max_position_embeddings=2048),
    "llama-1b": _llama(
        2048, 8192, 16, 32, 8, tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0)
    ),  # Llama 3.2
    "llama-3b": _llama(
        3072, 8192, 28, 24, 8, tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0)
    ),  # Llama 3.2
    "llama-7b": _llama(4096, 11008, 32, 32, 32, vocab_size=32000, max_position_embeddings=4096),  # Llama 2
    "llama-8b": _llama(4096, 14336, 32, 32, 8, rope_parameters=_llama3_rope(8.0)),  # Llama 3.1
    "llama-70b": _llama(8192, 28672, 80, 64, 8, rope_parameters=_llama3_rope(8.0)),  # Llama 3.1
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen2.5-vl-3b": _qwen25_vl(2048, 11008, 36, 16, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-vl-7b": _qwen25_vl(3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False),
}


def require_one_of(names: Iterable[str], given: str, what: str) -> str:
    """`given`, if it is one of the names; else an error with the nearest of them."""
    known = list(names)
    if given not in known:
        near = difflib.get_close_matches(given.lower().replace("_", "-"), known, n=1, cutoff=0.5)
        do = f"Use {near[0]}" if near else "Choose one of them"
        raise ConfigError(tell(f"{what} is one of {', '.join(known)}", f"{given!r} was given", do))
    return given


def shape_config(name: str, *, seq: int = 0) -> Any:
    """The transformers config of a shape, with room for `seq` positions."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPES[require_one_of(SHAPES, name, "a shape")], use_cache=False)
    text = config.get_text_config()
    text.max_position_embeddings = max(text.max_position_embeddings, seq)
    return config
