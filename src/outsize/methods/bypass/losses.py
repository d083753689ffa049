"""Losses that compare a student's output with its teacher's: in fp32, over valid tokens.

All but `mse` do not depend on the scale of the target, and are finite with a target of zeros. Equal outputs give a loss
of exactly 0 and gradients of exactly 0.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(output, target, valid) to a scalar. output and target: (rows, tokens, hidden); valid: (rows, tokens), True where a
token counts, or None if all do."""

_EPS = 1e-12
"""Added to the mean square of a target."""


def nmse(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """Squared error of the batch over the squares of the target."""
    error, squares = _sums(output, target, valid)
    return error.sum() / (squares.sum() + _EPS * error.numel() * output.shape[-1])


def nmse_row(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """`nmse` of each row, averaged over the rows that have valid tokens."""
    error, squares = _sums(output, target, valid)
    rows = error.sum(1) / (squares.sum(1) + _EPS * error.shape[1] * output.shape[-1])
    return rows.sum() / (len(rows) if valid is None else valid.any(1).sum().clamp(min=1))


def nmse_token(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """`nmse` of each token, averaged."""
    error, squares = _sums(output, target, valid)
    return (error / (squares + _EPS * output.shape[-1])).sum() / _num_valid(error, valid)


def mse(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """Mean squared error."""
    error, _ = _sums(output, target, valid)
    return error.sum() / (_num_valid(error, valid) * output.shape[-1])


def cosine(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """1 - cosine of the angle between output and target of each token, averaged."""
    error, _ = _sums(_normalized(output), _normalized(target), valid)
    return error.sum() / 2 / _num_valid(error, valid)


LOSSES: Mapping[str, Loss] = {
    "nmse": nmse,
    "nmse_row": nmse_row,
    "nmse_token": nmse_token,
    "mse": mse,
    "cosine": cosine,
}
"""By the name in `prune.loss`."""


def _sums(output: Tensor, target: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums over each token's vector, of the squared error and of the target's squares; 0 where a token is not valid."""
    output, target = output.float(), target.float()
    if valid is not None:
        left_out = ~valid.unsqueeze(-1)
        output, target = output.masked_fill(left_out, 0), target.masked_fill(left_out, 0)
    return (output - target).square().sum(-1), target.square().sum(-1)


def _num_valid(error: Tensor, valid: Tensor | None) -> Tensor | int:
    return error.numel() if valid is None else valid.sum().clamp(min=1)


def _normalized(vectors: Tensor) -> Tensor:
    vectors = vectors.float()
    return vectors * (vectors.square().sum(-1, keepdim=True) + _EPS * vectors.shape[-1]).rsqrt()
