"""Attention of packed rows in all families of language models: documents as they are alone, or a mask, with the reason."""

from typing import Any

import packed
import pytest
import torch
from kinds import text

from outsize.data.packing import keeps_documents_apart
from outsize.model.packed_attention import VARLEN, register, why_masked

pytestmark = pytest.mark.full
TOKENS = 60
"""Of every vocabulary."""
MASKED = {
    "gemma2",
    "qwen3-next",
    "gpt-neo",
    "gptj",
    "bloom",
    "mpt",
    "falcon",
    "deepseek-v2",
    "deepseek-v3",
    "gpt-oss",
    "stablelm",
    "llama4",
    "minimax",
    "mamba",
    "mamba2",
    "rwkv",
    "jamba",
    "falcon-h1",
    "zamba2",
    "lfm2",
    "xlnet",
}
MIXED = {"recurrent-gemma"}
"""Layers other than attention mix documents: refused before the first step, with any attention."""
DECODERS = {**text.DECODERS, **text.STATE_SPACES}


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_documents_of_a_packed_row_are_as_alone_or_the_family_needs_a_mask(name: str) -> None:
    register()
    model: Any = DECODERS[name].build().eval()
    if name == "gpt2":
        model.config.attn_pdrop = 0.0
    model.config.use_cache = False
    reason = why_masked(type(model), model.config, on_gpu=False)
    assert bool(reason) == (name in MASKED), reason
    if reason:
        return
    documents = [document.clamp(max=TOKENS - 1) for document in packed.documents(9, 7)]
    alone = torch.cat([model(input_ids=document[None]).logits[0] for document in documents])
    model.config._attn_implementation = VARLEN
    found = model(**packed.batch(documents)).logits[0]
    apart = keeps_documents_apart(model, TOKENS, takes_boundaries=True)
    assert apart == torch.allclose(found, alone, rtol=0, atol=1e-5) == (name not in MIXED)
