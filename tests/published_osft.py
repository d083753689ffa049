"""The published steps of OSFT on factors, in fp64 and one process, written from their description."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Dense:
    """A parameter that trains as it is."""

    def __init__(self, weight: Tensor, *, lr: float, decay: float, eps: float):
        self.low = [weight.double().clone()]
        self.lr, self.decay, self.eps, self.time = lr, decay, eps, 0
        self.moments: list[tuple[Tensor, Tensor]] = []

    def weight(self, leaves: Sequence[Tensor]) -> Tensor:
        return leaves[0]

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)

    def adamw(self, gradients: Sequence[Tensor]) -> None:
        self.time += 1
        self.moments = self.moments or [(torch.zeros_like(t), torch.zeros_like(t)) for t in self.low]
        for i, g in enumerate(gradients):
            m, v = self.moments[i]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            self.moments[i] = (m, v)
            step = (m / (1 - 0.9**self.time)) / ((v / (1 - 0.999**self.time)).sqrt() + self.eps)
            self.low[i] = self.low[i] * (1 - self.lr * self.decay) - self.lr * step


class Factored(Dense):
    """Four factors: U_h S_h V_h + U diag(S) V."""

    def __init__(self, weight: Tensor, k: int, *, lr: float, decay: float, eps: float):
        super().__init__(weight, lr=lr, decay=decay, eps=eps)
        u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
        self.high = (u[:, :k] * s[:k]) @ v[:k]
        self.left, self.right = u[:, :k] @ u[:, :k].T, v[:k].T @ v[:k]
        self.low = [u[:, k:].clone(), s[k:].clone(), v[k:].clone()]

    def weight(self, leaves: Sequence[Tensor]) -> Tensor:
        u, s, v = leaves
        return self.high + u @ torch.diag(s) @ v

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        u, s, v = values
        return [u - self.left @ u, s, v - v @ self.right]


def published_step(weights: Sequence[Dense], loss_of, variant: str, max_norm: float) -> None:
    """`loss_of` takes the dense weights. PEFT's hooks project gradients in backward, before anything else sees them;
    mini_trainer clips, projects gradients, updates, and projects parameters."""
    leaves = [[t.clone().requires_grad_() for t in weight.low] for weight in weights]
    loss = loss_of([weight.weight(own) for weight, own in zip(weights, leaves, strict=True)])
    flat = iter(torch.autograd.grad(loss, [t for own in leaves for t in own]))
    gradients = [[next(flat) for _ in own] for own in leaves]
    if variant == "peft":
        gradients = [w.project(g) for w, g in zip(weights, gradients, strict=True)]
    norm = torch.sqrt(sum((g**2).sum() for own in gradients for g in own))
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    gradients = [[g * factor for g in own] for own in gradients]
    if variant == "mini_trainer":
        gradients = [w.project(g) for w, g in zip(weights, gradients, strict=True)]
    for weight, own in zip(weights, gradients, strict=True):
        weight.adamw(own)
        if variant == "mini_trainer":
            weight.low = weight.project(weight.low)
