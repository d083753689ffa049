"""The loss of distillation in chunks of tokens, so that neither model's logits exist as a whole.

For each token that counts: alpha × temperature² × KL(teacher ‖ student) of the probabilities at the temperature, plus
(1 - alpha) × the cross-entropy of the target. As in cross_entropy.py, the forward computes the gradients with the loss,
nothing reads a value from the device, and the length of a chunk depends only on the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from outsize.loss.cross_entropy import CHUNK_BYTES, LogitStep, apply_steps, divisor, undo_steps

MIN_TOKENS = 256


def chunk_tokens(vocab_size: int) -> int:
    """Tokens of a chunk: three tensors of its logits, in fp32, take about 512 MiB."""
    return max(MIN_TOKENS, CHUNK_BYTES // (12 * vocab_size) // 256 * 256)


@dataclass(frozen=True)
class TeacherHead:
    """What gives the teacher's logits from its last hidden states. Nothing of it is trained."""

    weight: Tensor  # (vocab, hidden)
    bias: Tensor | None = None
    steps: Sequence[LogitStep] = ()

    def logits(self, hidden: Tensor) -> Tensor:
        return apply_steps(self.steps, linear(hidden.to(self.weight.dtype), self.weight, self.bias))[0]


@dataclass(frozen=True)
class Mixture:
    alpha: float = 1.0
    """The share of the KL. 1: the targets only say which tokens count."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, but must be from 0 to 1.")
        if not self.temperature > 0:
            raise ValueError(f"The temperature is {self.temperature}, but must be above 0.")


@dataclass(slots=True)
class Lesson:
    """What the loss of the next forward compares the student with."""

    hidden: Tensor
    """The teacher's last hidden states, of the student's tokens."""
    head: TeacherHead
    mixture: Mixture
    is_used: bool = False


_LESSON: ContextVar[Lesson | None] = ContextVar("lesson", default=None)


@contextmanager
def teaching(lesson: Lesson) -> Iterator[None]:
    """Within it a chunked loss is that of distillation."""
    token = _LESSON.set(lesson)
    try:
        yield
    finally:
        _LESSON.reset(token)


def current_lesson() -> Lesson | None:
    return _LESSON.get()


def distillation(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher: TeacherHead,
    targets: Tensor,
    *,
    mixture: Mixture,
    chunk: int,
    steps: Sequence[LogitStep] = (),
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """The mean over the targets that count, or their sum divided by `num_items`; in fp32, of fp64 tensors in fp64.

    `hidden` is (tokens, hidden), `weight` (vocab, hidden), `targets` (tokens), `teacher_hidden` (tokens, the teacher's
    hidden size).
    """
    if teacher.weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"The teacher has {teacher.weight.shape[0]} tokens in its vocabulary and the student {weight.shape[0]}. "
            "Distillation needs the same vocabulary."
        )
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _Distillation.apply(
            hidden, weight, bias, teacher_hidden, teacher, targets, mixture, chunk, steps, ignore_index, num_items
        )
    return loss


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher: TeacherHead,
        targets: Tensor,
        mixture: Mixture,
        chunk: int,
        steps: Sequence[LogitStep],
        ignore_index: int,
        num_items: Tensor | float | None,
    ) -> Tensor:
        counts = targets != ignore_index
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        number = divisor(counts, num_items).to(dtype)
        shares = torch.where(counts, 1 / number, 0.0)
        targets = torch.where(counts, targets, 0)
        losses = torch.empty_like(shares)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits, kept = apply_steps(steps, linear(hidden[rows], weight, bias))
            expected = teacher.logits(teacher_hidden[rows]).to(dtype)
            losses[rows], grad = _loss_and_gradient(logits.to(dtype), expected, targets[rows], mixture)
            grad = undo_steps(steps, kept, grad.mul_(shares[rows].unsqueeze(-1)).to(logits.dtype))
            del logits, expected
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                torch.addmm(grad_weight, grad.t(), hidden[rows], out=grad_weight)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad  # frees it before the next chunk
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return losses.masked_fill_(~counts, 0.0).sum() / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        factor = incoming.reshape(1)  # with a dimension: bf16 gradients are multiplied by all of it
        grads = (grad if grad is None else grad.mul_(factor) for grad in ctx.saved_tensors)
        return (*grads, *(None,) * 8)


def _loss_and_gradient(logits: Tensor, expected: Tensor, targets: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Each token's loss and its gradient with respect to the logits. `expected` is overwritten."""
    alpha, temperature = mixture.alpha, mixture.temperature
    targets = targets.unsqueeze(-1)
    scaled = logits / temperature
    scaled -= scaled.logsumexp(-1, keepdim=True)
    expected = expected.div_(temperature)
    expected -= expected.logsumexp(-1, keepdim=True)
    probabilities = expected.exp()
    kl = expected.sub_(scaled).mul_(probabilities).sum(-1)
    grad = torch.sub(scaled.exp_(), probabilities, out=probabilities).mul_(alpha * temperature)
    # The model's own log-probabilities, in the memory of `scaled`.
    torch.sub(logits, logits.logsumexp(-1, keepdim=True), out=scaled)
    picked = scaled.gather(-1, targets)
    grad.add_(scaled.exp_(), alpha=1 - alpha)
    grad.scatter_add_(-1, targets, torch.full_like(picked, alpha - 1))
    return kl.mul_(alpha * temperature**2).sub_(picked.squeeze(-1), alpha=1 - alpha), grad
