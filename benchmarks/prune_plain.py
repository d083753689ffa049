"""What `outsize prune` is compared with: a plain step-by-step torch loop that holds a whole teacher and one student."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaRMSNorm

from benchmarks.shapes import named_config

_CLIP = 1.0


class _Student(nn.Module):
    """One variant of each sub-block of a layer, with the norm in front of it."""

    def __init__(self, config: Any, index: int, *, width: int, heads: int):
        super().__init__()
        changed = type(config).from_dict({**config.to_dict(), "intermediate_size": width, "num_key_value_heads": heads})
        changed._attn_implementation = config._attn_implementation
        self.norms = nn.ModuleList(LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
        self.attention, self.mlp = LlamaAttention(changed, index), LlamaMLP(changed)


def _nmse(output: Tensor, target: Tensor) -> Tensor:
    output, target = output.float(), target.float()
    return (output - target).square().sum() / target.square().sum()


def plain_loop(shape: str, *, rows: int, seq: int, width: int, heads: int, steps: int, warm_up: int) -> dict[str, Any]:
    """bf16 weights without fp32 masters, fused AdamW, clipping of all gradients together: less than outsize does."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    config = named_config(shape)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            teacher: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
            made = [_Student(config, i, width=width, heads=heads) for i in range(config.num_hidden_layers)]
            students = nn.ModuleList(made)
    finally:
        torch.set_default_dtype(torch.float32)
    params = list(students.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
    ids = torch.randint(0, config.vocab_size, (rows, seq), device=device)

    def step() -> None:
        with torch.no_grad():
            hidden = teacher.model.embed_tokens(ids)
            places = teacher.model.rotary_emb(hidden, torch.arange(seq, device=device)[None])
        for layer, student in zip(teacher.model.layers, made, strict=True):
            with torch.no_grad():
                attended = _attended(layer.self_attn, layer.input_layernorm(hidden), places)
                between = hidden + attended
                fed = layer.mlp(layer.post_attention_layernorm(between))
            loss = _nmse(_attended(student.attention, student.norms[0](hidden), places), attended)
            loss = loss + _nmse(student.mlp(student.norms[1](between)), fed)
            loss.backward()
            hidden = between + fed
        torch.nn.utils.clip_grad_norm_(params, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(warm_up):
        step()
    _wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait()
    seconds = (time.perf_counter() - started) / steps
    variants = 2 * len(made)
    return {
        "step_s": seconds,
        "tokens": rows * seq,
        "variants": variants,
        "tokens_variants_per_s": rows * seq * variants / seconds,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "losses_finite": all(bool(param.isfinite().all()) for param in params[:8]),
    }


def _attended(attention: nn.Module, hidden: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
    """Causal: without a mask, sdpa is called with `is_causal`."""
    output: Tensor = attention(hidden, position_embeddings=places, attention_mask=None)[0]
    return output


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
