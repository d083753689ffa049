"""What norms get and give, by residual channel: the channels of `prune.hidden_size` are ranked by it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.model.stack import first_tensor


class NormStatistics:
    """Accumulates over batches, in fp64 on the norms' device. Padding does not count."""

    def __init__(self, norms: Mapping[str, nn.Module]):
        """`norms`: by path in the model."""
        self._norms = norms
        self._sums: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(norms, 0)

    @contextmanager
    def listening(self, valid: Tensor | None) -> Iterator[None]:
        """Within it, the norms run on a batch. `valid`: (rows, tokens), or None if all tokens are."""
        with ExitStack() as stack:
            for name, module in self._norms.items():
                stack.callback(module.register_forward_hook(partial(self._add, name, valid), with_kwargs=True).remove)
            yield

    def _add(
        self, name: str, valid: Tensor | None, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        for kind, tensor in (("inputs", given), ("outputs", first_tensor(output))):
            rows = tensor.detach().reshape(-1, tensor.shape[-1])
            if valid is not None:
                rows = rows[valid.to(rows.device).flatten()]
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            sums = (rows.square() if kind == "inputs" else rows.abs()).sum(0, dtype=torch.float64)
            self._sums[f"{kind}/{name}"] = self._sums.get(f"{kind}/{name}", 0) + sums
        self._tokens[name] += len(rows)

    def tensors(self) -> dict[str, Tensor]:
        """By `outputs/PATH` the mean size and by `inputs/PATH` the mean square over tokens, of each channel."""
        if missing := [name for name, tokens in self._tokens.items() if not tokens]:
            raise ModelUnsupported(
                f"prune.hidden_size: {missing[0]}: the model's forward does not run this norm, so it cannot be "
                "rescaled. Remove hidden_size."
            )
        return {name: (sums / self._tokens[name.partition("/")[2]]).cpu() for name, sums in self._sums.items()}
