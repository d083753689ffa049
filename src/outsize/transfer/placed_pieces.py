"""PlacedPieces: where pieces of memory lie in areas of fixed sizes. First fit: pieces that are freed in the reverse
order of their making, as those of a forward and its backward, lie like a stack, and any other order leaves gaps that
are used again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    area: int
    start: int
    end: int


class PlacedPieces:
    def __init__(self) -> None:
        self.areas: list[int] = []
        """Size of each area."""
        self.most_used_bytes = 0
        self._pieces: list[Piece | None] = []

    def __getitem__(self, number: int) -> Piece:
        piece = self._pieces[number]
        assert piece is not None, "a piece is used after it was freed"
        return piece

    @property
    def num_bytes(self) -> int:
        return sum(self.areas)

    @property
    def used_bytes(self) -> int:
        return sum(piece.end - piece.start for piece in self._pieces if piece is not None)

    @property
    def is_idle(self) -> bool:
        return not any(self._pieces)

    def place(self, num_bytes: int) -> int | None:
        """Number of a new piece; None if no gap is large enough. Numbers of freed pieces are used again."""
        for area, size in enumerate(self.areas):
            start = 0
            for piece in self._in(area):
                if piece.start - start >= num_bytes:
                    break
                start = piece.end
            if size - start >= num_bytes:
                return self._add(Piece(area, start, start + num_bytes))
        return None

    def end_of_last(self, area: int) -> int:
        return max((piece.end for piece in self._in(area)), default=0)

    def free(self, number: int) -> None:
        self._pieces[number] = None

    def _in(self, area: int) -> list[Piece]:
        return sorted(
            (piece for piece in self._pieces if piece is not None and piece.area == area), key=lambda piece: piece.start
        )

    def _add(self, piece: Piece) -> int:
        number = next((i for i, held in enumerate(self._pieces) if held is None), len(self._pieces))
        self._pieces[number : number + 1] = [piece]
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        return number
