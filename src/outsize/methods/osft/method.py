"""OSFT: the settings of orthogonal subspace fine-tuning. Does not import torch."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outsize.base.errors import ConfigError
from outsize.methods.osft.shape import SplitShape

Others = Literal["train", "freeze", "norms"]
Variant = Literal["peft", "mini_trainer"]
RANK_MULTIPLE = 64
"""Free ranks of drifts are multiples of this, as matrix products run fastest then."""
_OTHERS_OF: dict[str | None, Others] = {None: "train", "peft": "freeze", "mini_trainer": "train"}


@dataclass(frozen=True, kw_only=True)
class OSFT:
    """Train each weight only outside of its large singular directions, on both sides.

    Give one rank: `unfreeze_rank_ratio` (the share of free directions; 0 freezes a weight, 1 trains it normally) or
    `effective_rank` (frozen directions: a count, or a fraction in (0, 1]).
    """

    unfreeze_rank_ratio: float | None = None
    effective_rank: int | float | None = None
    parametrization: Literal["drift", "factors"] = "drift"
    """`drift` trains D in W0 + Q D P. `factors` trains U, S and V as the published implementations do."""
    variant: Variant | None = None
    """Which published implementation `factors` follows, also in how ranks are computed."""
    target_modules: str | Sequence[str] | None = None
    """Names of linear modules (or the ends of their names), or one regular expression for whole names. None: all linear
    modules but the output head.
    """
    rank_pattern: Mapping[str, int | float] = field(default_factory=dict)
    """By regular expression, searched in module names: the value that replaces the rank above. The first that is found
    holds.
    """
    others: Others | None = None
    """What happens to all other parameters. `norms` trains those of normalization layers. None: `train`; `freeze` for
    the variant `peft`.
    """
    svd: bool = False
    """Decompose by SVD instead of the Gram matrix's eigenvectors: slower, and hardly more accurate. `factors` always
    does.
    """

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("OSFT: " + "; ".join(problems) + ".")

    def _problems(self) -> list[str]:
        problems = []
        if (self.unfreeze_rank_ratio is None) == (self.effective_rank is None):
            number = "none is" if self.effective_rank is None else "both are"
            problems.append(
                f"exactly one of unfreeze_rank_ratio and effective_rank is needed, and {number} given. Set "
                "unfreeze_rank_ratio to train, for example, 0.25 of the directions"
            )
        allowed: dict[str, tuple[Any, ...]] = {
            "parametrization": ("drift", "factors"),
            "variant": ("peft", "mini_trainer") if self.parametrization == "factors" else (None,),
            "others": (None, "train", "freeze", "norms"),
            "svd": (True, False),
        }
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                where = f" with parametrization={self.parametrization!r}" if name == "variant" else ""
                problems.append(f"{name} is {value!r}{where}; it can be {' or '.join(map(repr, values))}")
        rank = "effective_rank" if self.unfreeze_rank_ratio is None else "unfreeze_rank_ratio"
        if self.variant in _RANK_OF and rank != _RANK_OF[self.variant]:
            problems.append(f"{rank} is not a setting of {self.variant}. Set {_RANK_OF[self.variant]}")
        if not isinstance(self.rank_pattern, Mapping):
            return [*problems, f"rank_pattern is {self.rank_pattern!r}; it must be a dict of patterns and ranks"]
        names = self.target_modules
        if not (names is None or (isinstance(names, Sequence) and all(isinstance(name, str) for name in names))):
            return [*problems, f"target_modules is {names!r}; it must be a list of names, or a string"]
        given = {} if getattr(self, rank) is None else {rank: getattr(self, rank)}
        given |= {f"rank_pattern[{pattern!r}]": value for pattern, value in self.rank_pattern.items()}
        meaning = "a count or a fraction in (0, 1]" if rank == "effective_rank" else "a number from 0 to 1"
        problems += [f"{k} is {v!r}; it must be {meaning}" for k, v in given.items() if not self._is_rank(v)]
        patterns = [*self.rank_pattern, *([self.target_modules] if isinstance(self.target_modules, str) else [])]
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"{pattern!r} is no regular expression ({error}). Correct it")
        return problems

    def _is_rank(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.effective_rank is None:
            return 0 <= value <= 1
        return value >= 0 if isinstance(value, int) else 0 < value <= 1

    def bind(self, model: Any) -> Any:
        """The method for one model (optim/method.py). Freezes what it does not train."""
        return importlib.import_module("outsize.methods.osft.drift").DriftTraining.of(model, self)

    @property
    def trains_others(self) -> Others:
        return self.others or _OTHERS_OF[self.variant]

    def is_target(self, module: str) -> bool:
        """Whether `target_modules` names this module. True for all if it names none."""
        if self.target_modules is None:
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(module == name or module.endswith("." + name) for name in self.target_modules)

    def unknown_targets(self, linear: Sequence[str]) -> list[str]:
        """The names in `target_modules` that none of these modules has."""
        if self.target_modules is None or isinstance(self.target_modules, str):
            return []
        return [
            name
            for name in self.target_modules
            if not any(module == name or module.endswith("." + name) for module in linear)
        ]

    def unknown_patterns(self, modules: Sequence[str]) -> list[str]:
        """The patterns in `rank_pattern` that none of these modules' names contains."""
        return [p for p in self.rank_pattern if not any(re.search(p, module) for module in modules)]

    def shape(self, module: str, rows: int, columns: int, *, is_transposed: bool = False) -> SplitShape:
        """How the weight of a module is split."""
        small = min(rows, columns)
        return SplitShape(rows, columns, self._frozen_rank(module, small), is_transposed)

    def _frozen_rank(self, module: str, small: int) -> int:
        found = (value for pattern, value in self.rank_pattern.items() if re.search(pattern, module))
        value = next(found, self.effective_rank if self.unfreeze_rank_ratio is None else self.unfreeze_rank_ratio)
        assert value is not None
        if self.unfreeze_rank_ratio is not None:
            if value in (0, 1):
                return small if value == 0 else 0
            if self.variant == "mini_trainer":
                return min(int(small * (1.0 - value)), small - 1)
            return small - _rounded(small * value, small)
        frozen = min(value if isinstance(value, int) else small * value, small)
        if self.variant == "peft":
            return int(frozen)
        return small - (_rounded(small - frozen, small) if 0 < frozen < small else int(small - frozen))


_RANK_OF = {"peft": "effective_rank", "mini_trainer": "unfreeze_rank_ratio"}


def _rounded(rank: float, small: int) -> int:
    """The nearest multiple of RANK_MULTIPLE that leaves free and frozen directions; of a smaller weight, the nearest
    rank that does.
    """
    step = RANK_MULTIPLE if small > RANK_MULTIPLE else 1
    return max(step, min(int(rank / step + 0.5), (small - 1) // step) * step)
