"""The plans under which tests/foreign runs other people's loops, and the plain loop each of them must equal."""

from typing import Any

import cells
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
SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)


def prepared(model: nn.Module, batch: Any, plan: str, *, spec: outsize.AdamW = SPEC, **how: Any) -> Engine:
    return cells.prepare_by_hand(model, batch, spec=spec, **{**PLANS[plan], **how})


def reference(model: nn.Module, spec: outsize.AdamW = SPEC) -> Reference:
    return Reference(
        spec.param_groups(model.named_parameters()), lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm, nonfinite=spec.nonfinite, fp32_grads=spec.fp32_grads,
    )  # fmt: skip


def both(plan: str, kind: str = "llama", *, spec: outsize.AdamW = SPEC, **make: Any) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Engine]]:
    """A plain model with its optimizer, and the same model prepared."""
    plain, model = zoo.make(kind, **make), zoo.make(kind, **make)
    return (plain, reference(plain, spec)), (model, prepared(model, zoo.batch(kind), plan, spec=spec))
