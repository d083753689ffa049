"""Sub-blocks: the halves of a layer that are pruned and trained on their own. One mixes tokens (attention, Mamba), the
other is a feed-forward network or experts. The norm in front belongs to the sub-block.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from outsize.model.stack import LayerCall

Kind = Literal["attention", "mixer", "ffn"]
"""`mixer`: mixes tokens without keys and values of heads (Mamba, linear attention)."""
Learn = Literal["attention", "mixer", "ffn", "block"]
"""What is trained: a sub-block, or the whole layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubBlock:
    kind: Kind
    module: str
    """Path in the layer."""
    norm: str | None
    """Path of the norm whose output is the module's input. None: there is none, or another sub-block reads it too; then
    it is not trained.
    """


@dataclass(frozen=True, slots=True)
class SubBlockRun:
    """What the teacher's forward gave a sub-block (or the whole layer), and the output that a student is compared
    with."""

    input: Tensor
    """Input of the norm; of the module if the norm is not trained."""
    call: LayerCall
    """The other arguments of the module."""
    target: Tensor
    """The module's output, before the residual is added. Of the whole layer: what it adds to its input, in fp32."""


def find_subblocks(
    layer: nn.Module, call: LayerCall, hidden: Tensor, overrides: Mapping[str, Mapping[str, str | None]] | None = None
) -> dict[Kind, SubBlock]:
    """The sub-blocks of a layer, found by running it on a batch's hidden state.

    `overrides`: by kind, `module` and `norm` as paths in the layer (`prune.subblocks`), instead of those found.
    """
    raise NotImplementedError


def record(
    layer: nn.Module, subblocks: Mapping[Kind, SubBlock], learn: Collection[Learn], call: LayerCall, hidden: Tensor
) -> tuple[Tensor, dict[Learn, SubBlockRun]]:
    """Run a teacher's layer without grad. Returns its output, and the runs that students of `learn` need."""
    raise NotImplementedError
