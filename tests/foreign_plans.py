"""The plans under which tests/foreign runs other people's loops, and the plain loop each of them must equal."""

from typing import Any

import cells
import pytest
import torch
import zoo
from torch import nn

import outsize
from outsize.reference import AdamW as Reference
from outsize.runtime.engine import Engine

STREAMED: dict[str, Any] = dict(weights="host", optimizer="host", depth=0, strategy="recompute")
"""Everything streamed, at the fewest slots."""
RESIDENT: dict[str, Any] = dict(weights="gpu", optimizer="gpu", strategy="keep")
MIXED: dict[str, Any] = dict(weights="gpu", optimizer="host", strategy="keep")
"""Resident weights that the host updates: two copies of each."""
PLANS = {"streamed": STREAMED, "resident": RESIDENT, "mixed": MIXED}
EVERY_PLAN = pytest.mark.parametrize("plan", ["streamed", "mixed", pytest.param("resident", marks=pytest.mark.full)])
"""`mixed` has what is hard about `resident`, which runs in `make test-all`."""
SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)


def prepared(model: nn.Module, batch: Any, plan: str, *, spec: outsize.AdamW = SPEC, **how: Any) -> Engine:
    """The zoo's llama, which most of these tests train, is traced once per dtype and process."""
    is_llama = (
        type(model).__name__ == "LlamaForCausalLM"
        and model.config.tie_word_embeddings
        and not hasattr(model, "peft_config")
    )
    if is_llama and all(param.requires_grad for param in model.parameters()):
        dtype: Any = {torch.float32: "fp32", torch.bfloat16: "bf16"}[next(model.parameters()).dtype]
        how.setdefault("traced", cells.Cell(kind="llama", dtype=dtype).traced())
    return cells.prepare_by_hand(model, batch, spec=spec, **{**PLANS[plan], **how})


def reference(model: nn.Module, spec: outsize.AdamW = SPEC) -> Reference:
    return Reference(
        spec.param_groups(model.named_parameters()),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        nonfinite=spec.nonfinite,
        fp32_grads=spec.fp32_grads,
    )


def both(
    plan: str, kind: str = "llama", *, spec: outsize.AdamW = SPEC, **make: Any
) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Engine]]:
    """A plain model with its optimizer, and the same model prepared."""
    plain, model = zoo.make(kind, **make), zoo.make(kind, **make)
    return (plain, reference(plain, spec)), (model, prepared(model, zoo.batch(kind), plan, spec=spec))
