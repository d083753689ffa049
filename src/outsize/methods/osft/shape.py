"""SplitShape: the sizes of one weight's split into frozen and free directions, and the workspace of its products.

Does not import torch: the planner counts these bytes.
"""

from dataclasses import dataclass

from outsize.base.units import ALIGN_BYTES

_BLOCK_NUMEL = 2**23
"""Products are computed in blocks of about this many elements. Part of the arithmetic: bits may depend on it."""
_BLOCK_MULTIPLE = 128


def aligned_bytes(*sizes: int) -> int:
    """The bytes of parts of these sizes, each begun at an aligned offset."""
    return sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)


@dataclass(frozen=True, slots=True)
class SplitShape:
    rows: int
    columns: int
    frozen_rank: int
    """k: the number of frozen directions on either side, 0 to min(rows, columns)."""
    is_transposed: bool = False
    """The weight is stored as (inputs, outputs), as Conv1D does. Matters for square weights alone."""

    @property
    def small(self) -> int:
        return min(self.rows, self.columns)

    @property
    def large(self) -> int:
        return max(self.rows, self.columns)

    @property
    def rank(self) -> int:
        """r: the number of free directions."""
        return self.small - self.frozen_rank

    @property
    def is_mirrored(self) -> bool:
        """The free basis is on the right of the drift: W = W0 + P D Qᵀ."""
        return self.rows > self.columns or (self.rows == self.columns and self.is_transposed)

    @property
    def drift(self) -> tuple[int, int]:
        return (self.rows, self.rank) if self.is_mirrored else (self.rank, self.columns)

    @property
    def drift_numel(self) -> int:
        return self.rank * self.large

    @property
    def free(self) -> tuple[int, int]:
        """Q, the basis of the free directions on the smaller side: orthonormal columns."""
        return self.small, self.rank

    @property
    def frozen(self) -> tuple[int, int]:
        """H, the basis of the frozen directions on the larger side: orthonormal rows. P = I - HᵀH."""
        return self.frozen_rank, self.large

    @property
    def bases_numel(self) -> int:
        return self.small * self.rank + self.frozen_rank * self.large

    @property
    def contract_rows(self) -> int:
        """Rows of the drift's gradient per block of `contract` (columns, if mirrored)."""
        return min(self.rank, max(1, _BLOCK_NUMEL // self.large // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE)

    @property
    def merge_columns(self) -> int:
        """Columns of the weight per block of `merge` (rows, if mirrored)."""
        return min(self.large, max(1, _BLOCK_NUMEL // self.small // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE)

    def contract_scratch_bytes(self, itemsize: int, *, accumulate: bool = False) -> int:
        """Workspace of `contract`. `itemsize`: bytes of an element of the weight; 2 means bf16 with halved bases."""
        wide, block, frozen = max(itemsize, 4), self.contract_rows * self.large, self.contract_rows * self.frozen_rank
        sizes = [wide * frozen, wide * block * accumulate]
        if itemsize == 2 and self.frozen_rank:
            sizes += [2 * block, 2 * frozen]
        return aligned_bytes(*sizes)

    def merge_scratch_bytes(self, itemsize: int) -> int:
        """Workspace of `merge`, as for `contract_scratch_bytes`."""
        wide, block = max(itemsize, 4), self.rank * self.merge_columns
        core, delta = self.rank * self.frozen_rank, self.small * self.merge_columns
        if itemsize == 2:
            return aligned_bytes(2 * core, 2 * core, 2 * block, 2 * block) + max(
                aligned_bytes(wide * core, wide * block), aligned_bytes(wide * delta)
            )
        return aligned_bytes(wide * core, wide * block, wide * delta)

    @property
    def contract_flops(self) -> int:
        return 2 * self.rank * self.large * (self.small + 2 * self.frozen_rank)

    merge_flops = contract_flops
    """Of one precision: bf16 weights take three products for one."""
