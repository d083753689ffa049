"""Builds students: modules of the teacher's layer class with a changed config, filled with tensors made from the
teacher's (methods/bypass/tensors.py).
"""

import torch
from torch import Tensor, nn

from outsize.methods.bypass.importance import LayerImportance
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.subblocks import SubBlockRun
from outsize.methods.bypass.variants import Variant


class Student(nn.Module):
    """A pruned sub-block with the norm in front of it, or a pruned layer. In eval mode, trainable."""

    def forward(self, run: SubBlockRun) -> Tensor:
        """The output that is compared with `run.target`."""
        raise NotImplementedError

    def layer_tensors(self) -> dict[str, Tensor]:
        """The parameters and saved buffers, by their names in the layer (`mlp.down_proj.weight`). Empty for a skipped
        sub-block.
        """
        raise NotImplementedError


def student_numels(parts: LayerParts, variant: Variant) -> dict[str, tuple[int, torch.dtype]]:
    """The parameters that a student will train, for `optim.flat.flat_bytes`. Needs no weights."""
    raise NotImplementedError


def build_student(parts: LayerParts, variant: Variant, importance: LayerImportance | None = None) -> Student:
    """A student of a layer whose weights are materialized, on the device where they are. `importance` None: channels
    and experts are truncated (the first are kept).
    """
    raise NotImplementedError
