"""Cross-entropy of a linear head over chunks of tokens: loss and gradients without all logits at once.

The forward computes the gradients with the loss, while a chunk's logits exist; backward only scales them. So a second
backward through the same graph and double backward are not possible. Nothing here syncs with the device or reads a
value, so it also runs on fake tensors.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from outsize.base.repeats import iterations
from outsize.compat import fake_tensor

LogitStep = tuple[Literal["mul", "div", "tanh", "to"], Any]
"""An operation on the logits before the loss. The operand is a number, None or a dtype."""

CHUNK_BYTES = 512 * 2**20
MIN_TOKENS = 1024


def chunk_tokens(vocab_size: int) -> int:
    """Tokens of a chunk: their logits take about 512 MiB in fp32.

    It depends only on the vocabulary: if it depended on the plan, so would the bits. At least 1024, because every chunk
    reads the head's weight and reads and writes its gradient, which takes as long as the products of few rows.
    """
    return max(MIN_TOKENS, CHUNK_BYTES // (4 * vocab_size) // 256 * 256)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    chunk: int,
    steps: Sequence[LogitStep] = (),
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """The cross-entropy of `steps(hidden @ weight.T + bias)`, in fp32: the mean over the targets that count, or their
    sum divided by `num_items`.

    `hidden` is (tokens, hidden), `weight` (vocab, hidden), `targets` (tokens); all but the targets are of one dtype.
    `chunk`: tokens at once.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _CrossEntropy.apply(hidden, weight, bias, targets, chunk, steps, ignore_index, num_items)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        steps: Sequence[LogitStep],
        ignore_index: int,
        num_items: Tensor | float | None,
    ) -> Tensor:
        counts = targets != ignore_index
        total = divisor(counts, num_items)
        shares = torch.where(counts, 1 / total, 0.0)  # (tokens), fp32; zeros if no target counts, as in torch
        targets = torch.where(counts, targets, 0)
        losses = torch.empty_like(shares)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for number in iterations(-(-len(targets) // chunk), is_fake=isinstance(hidden, fake_tensor.FakeTensor)):
            rows = slice(number * chunk, (number + 1) * chunk)
            grad = _logit_gradient(linear(hidden[rows], weight, bias), steps, targets[rows], shares[rows], losses[rows])
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                torch.addmm(grad_weight, grad.t(), hidden[rows], out=grad_weight)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad  # frees it before the next chunk
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return losses.masked_fill_(~counts, 0.0).sum() / total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the weight's gradient may be a gigabyte. The factor has a dimension, so that bf16
        # gradients are multiplied by all of it.
        factor = incoming.reshape(1)
        return (
            *(grad if grad is None else grad.mul_(factor) for grad in ctx.saved_tensors),
            None,
            None,
            None,
            None,
            None,
        )


def divisor(counts: Tensor, num_items: Tensor | float | None) -> Tensor:
    """The divisor of the sum, in fp32."""
    if num_items is None:
        return counts.sum().float()
    if isinstance(num_items, Tensor):
        return num_items.to(counts.device, torch.float32)
    return torch.full((), num_items, dtype=torch.float32, device=counts.device)


def _logit_gradient(
    logits: Tensor, steps: Sequence[LogitStep], targets: Tensor, shares: Tensor, losses: Tensor
) -> Tensor:
    """The gradient of one chunk's logits, in their memory; writes each token's loss to `losses`. With
    bf16 logits, allocates one fp32 tensor of their size.
    """
    logits, kept = apply_steps(steps, logits)
    targets, shares = targets.unsqueeze(-1), shares.unsqueeze(-1)  # (tokens, 1)
    top = logits.amax(-1, keepdim=True).float()
    exps = logits.sub_(top) if logits.dtype == torch.float32 else logits - top
    picked = exps.gather(-1, targets)
    total = exps.exp_().sum(-1, keepdim=True)
    torch.sub(total.log(), picked, out=losses.unsqueeze(-1))
    # (probability - one at the target) × share. At the target in fp32: rounding a probability near one gives zero.
    at_target = (picked.exp_().div_(total) - 1).mul_(shares)
    grad = torch.mul(exps, shares / total, out=logits)
    grad.scatter_(-1, targets, at_target.to(grad.dtype))
    return undo_steps(steps, kept, grad)


def apply_steps(steps: Sequence[LogitStep], logits: Tensor) -> tuple[Tensor, list[Any]]:
    """The logits after all steps, and the values that the backward of each step needs."""
    kept: list[Any] = []
    for name, value in steps:
        if name == "to":
            kept.append(logits.dtype)
            logits = logits.to(value)
        elif name == "tanh":
            kept.append(logits.tanh_().clone())
        else:
            kept.append(None)
            logits = logits.mul_(value) if name == "mul" else logits.div_(value)
    return logits, kept


def undo_steps(steps: Sequence[LogitStep], kept: list[Any], grad: Tensor) -> Tensor:
    for (name, value), saved in zip(reversed(steps), reversed(kept), strict=True):
        if name == "to":
            grad = grad.to(saved)
        elif name == "tanh":
            torch.ops.aten.tanh_backward.grad_input(grad, saved, grad_input=grad)
        else:
            grad = grad.mul_(value) if name == "mul" else grad.div_(value)
    return grad
