"""Attention of packed rows: each document computes what it computes alone, and no mask of tokens × tokens exists."""

from collections.abc import Callable
from typing import Any

import packed
import pytest
import torch
import transformers
import zoo
from packed import VARLEN, WINDOW
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.base.errors import ModelUnsupported
from outsize.device.observer import Observer
from outsize.model.packed_attention import packed_attention, why_masked

LENGTHS = (9, 7, 1, 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_document_has_the_bits_of_sdpa_alone_in_forward_and_backward(dtype: torch.dtype, window: int) -> None:
    tokens = sum(LENGTHS)
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(tokens, heads, 8, generator=rng).to(dtype).requires_grad_() for heads in (4, 2, 2))
    ends = torch.tensor([0, *LENGTHS, 0, 0]).cumsum(0).int()  # documents of no tokens at the end
    out, _ = packed_attention(query, key, value, ends, max(LENGTHS), window, 0.3)
    grad = torch.randn(out.shape, generator=rng).to(dtype)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        alone = [t[part].transpose(0, 1)[None].detach().requires_grad_() for t in (query, key, value)]
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window) if 0 < window <= length else None
        found = sdpa(*alone, attn_mask=seen, is_causal=seen is None, scale=0.3, enable_gqa=True)
        assert torch.equal(found[0].transpose(0, 1), out[part])
        for whole, one in zip(grads, torch.autograd.grad(found, alone, grad[part].transpose(0, 1)[None]), strict=True):
            assert torch.equal(whole[part], one[0].transpose(0, 1))
        start += length


@pytest.mark.parametrize("kind", packed.KINDS)
def test_logits_and_gradients_of_a_packed_document_are_those_it_has_alone(kind: str) -> None:
    """To rounding: matrix products and GELU round by the number of tokens, and gradients of weights are sums over all
    tokens of a row. Attention itself has the same bits.
    """
    model = packed.model(kind)
    rows = [packed.documents(9, 7), packed.documents(16, seed=1)]
    out = model(**packed.batch(*rows))
    out.loss.backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    alone: Any = packed.model(kind, attention="sdpa")
    labels = sum(len(document) - 1 for row in rows for document in row)
    for index, row in enumerate(rows):
        start = 0
        for document in row:
            one = alone(input_ids=document[None], labels=document[None])
            (one.loss * (len(document) - 1) / labels).backward()
            logits = out.logits[index, start : start + len(document)]
            torch.testing.assert_close(logits, one.logits[0], rtol=0, atol=1e-6)
            start += len(document)
    for (name, param), grad in zip(alone.named_parameters(), found, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-6, msg=name)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest, self.names = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        self.largest = max(
            [self.largest, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))]
        )
        return out


def test_no_tensor_of_tokens_by_tokens_exists_and_no_layer_syncs_the_host() -> None:
    tokens, seen = 256, {}
    for attention in (VARLEN, "sdpa"):
        model = packed.model("gemma3", attention=attention)
        batch = packed.batch(packed.documents(100, 100, 56), boundaries=attention == VARLEN)
        with Seen() as seen[attention]:
            model(**batch).loss.backward()
    assert seen["sdpa"].largest >= tokens**2 > seen[VARLEN].largest
    assert "outsize::packed_attention_backward" in seen[VARLEN].names
    assert not {name for name in seen[VARLEN].names if name in ("aten::_local_scalar_dense", "aten::nonzero")}


def test_attention_costs_what_its_documents_cost() -> None:
    def cost(*lengths: int) -> float:
        query = torch.randn(sum(lengths), 2, 8)
        observer = Observer()
        observer.cost_of = lambda flops, moved: flops
        with observer:
            packed_attention(query, query, query, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), 0, 1.0)
        return observer.flops

    assert cost(64) == 2 * cost(32, 32) == 4 * cost(16, 16, 16, 16) == 2.0 * 64 * 32 * 2 * 16


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model, batch: batch.pop("document_offsets"), "no document_offsets"),
        (lambda model, batch: setattr(model.model.layers[0].self_attn, "attention_dropout", 0.1), "dropout 0.1"),
        (lambda model, batch: setattr(model.model.layers[0].self_attn, "is_causal", False), "both directions"),
        (lambda model, batch: batch.update(softcap=5.0), "softcap"),
    ],
)
def test_what_it_cannot_compute_is_refused(change: Callable[[Any, Any], Any], problem: str) -> None:
    model, batch = packed.model("llama"), packed.batch(packed.documents(9, 7))
    change(model, batch)
    with pytest.raises(ModelUnsupported, match=f"was called by LlamaAttention with .*{problem}.*sdpa"):
        model(**batch)


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("Llama", {}, ""),
        ("Qwen3", {}, ""),
        ("Mixtral", {}, ""),
        ("Gemma3", {}, ""),
        ("GPT2LMHeadModel", {"attn_pdrop": 0.0, "hidden_size": 64, "num_attention_heads": 8}, ""),
        ("GPT2LMHeadModel", {}, "its attention has dropout (attn_pdrop)"),
        ("Gemma2", {}, "its attention scores are capped (attn_logit_softcapping)"),
        ("GptOss", {}, "its attention has sinks, biases or a form of its own"),
        ("Qwen3Next", {}, "its attention has sinks, biases or a form of its own"),
        ("DeepseekV3", {}, "its values have another head dimension than its queries"),
        ("Llama", {"hidden_size": 60, "num_attention_heads": 5}, "its head dimension is 12"),
    ],
)
def test_models_that_need_a_mask_are_known_with_the_reason(name: str, settings: dict[str, Any], why: str) -> None:
    kind = getattr(transformers, name if name.endswith("Model") else f"{name}ForCausalLM")
    assert why_masked(kind, kind.config_class(**settings), on_gpu=True) == why


def test_the_head_dimension_matters_on_a_gpu_only() -> None:
    config = transformers.LlamaConfig(hidden_size=60, num_attention_heads=5, vocab_size=zoo.VOCAB)
    assert not why_masked(transformers.LlamaForCausalLM, config, on_gpu=False)
