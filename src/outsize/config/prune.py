"""PruneConfig: the keys under `prune:`, for `outsize prune`. The keys of a run (run.py) hold beside them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from outsize.base.records import Rule
from outsize.base.units import parse_count
from outsize.config.prune_target import PruneDistill, PruneTarget
from outsize.config.types import Count, CountFromZero, Positive, Text


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


Tokens = Annotated[
    int, Rule(expected="a number of tokens such as 50M", convert=parse_count, holds=lambda value: value >= 1)
]
Width = Annotated[
    float | int,
    Rule(
        expected="a width, or a share of the teacher's below 1",
        holds=lambda value: 0 < value < 1 or (isinstance(value, int) and value >= 1),
    ),
]
Widths = Annotated[tuple[Width, ...], Rule(expected="a list of widths", convert=_as_list)]
Counts = Annotated[tuple[Count, ...], Rule(expected="a list of positive integers", convert=_as_list)]
Layers = Annotated[tuple[CountFromZero, ...], Rule(expected="a list of layer numbers", convert=_as_list)]
SubblockName = Literal["attention", "ffn"]
Learned = Annotated[
    Literal["attention", "mixer", "ffn", "block"],
    Rule(
        also=(
            ("subblock_attention", "attention"),
            ("subblock_ffn", "ffn"),
            ("subblock_mamba", "mixer"),
            ("entire_block", "block"),
        )
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneConfig:
    tokens: Tokens = 50_000_000
    """The budget: tokens that each variant is trained on."""
    intermediate_size: Widths = ()
    """Variants of the feed-forward part: widths, or shares of the teacher's."""
    num_key_value_heads: Counts = ()
    """Variants of attention: numbers of KV heads that divide the teacher's."""
    kv_heads: Literal["average", "select", "first"] = "average"
    """How KV heads are made from a group of the teacher's: their average, the most important one, or the first."""
    experts: Counts = ()
    """Variants of a mixture of experts: numbers of experts."""
    hidden_size: Count | None = None
    """Residual channels of all variants and models, chosen once for the whole model. None: the teacher's."""
    skip: tuple[SubblockName, ...] = ()
    """Sub-blocks that also get a variant that adds nothing. It has no weights."""
    linear: bool = False
    """Also a variant of attention that is one matrix."""
    copy: tuple[SubblockName, ...] = ()
    """Sub-blocks that also get a variant equal to the teacher's."""
    learn: tuple[Learned, ...] = ("mixer", "ffn")
    """Sub-blocks that have variants, each trained on its own output. `mixer`: attention, or what a layer has in
    its place (Mamba). `block`: all combinations, trained on what the whole layer adds.
    """
    loss: Literal["nmse", "nmse_row", "nmse_token", "mse", "cosine"] = "nmse"
    importance: Literal["independent", "iterative", "truncate"] = "independent"
    """How channels, heads and experts are ranked. `truncate`: the first stay."""
    importance_tokens: Tokens = 262_144
    only_layers: Layers = ()
    """Layers that are pruned. Empty: all."""
    keep: Literal["best", "latest", "both"] | None = None
    """Which weights of a variant the library has. None: those with the lowest validation loss, or without validation
    data the last.
    """
    keep_optimizer: bool = False
    """The library also has what is needed to train a finished variant further."""
    cache_dir: Text | None = None
    """A folder for hidden states that host memory has no room for."""
    blocks: Text | None = None
    """The name of the model's list of layers. None: the largest."""
    subblocks: dict[Literal["attention", "ffn", "attention_norm", "ffn_norm"], Text] | None = None
    """Names in a layer of these modules, instead of those found."""
    target: tuple[PruneTarget, ...] = ()
    """Limits of the model that is put together from the variants; of a list, one model each. Empty: the library is the
    result.
    """
    shape: Literal["free", "uniform"] = "free"
    """`uniform`: all kept layers have the same variants, and whole layers are dropped."""
    score: Literal["kl", "local"] = "kl"
    """What a choice minimizes: the sum of each variant's KL to the teacher, alone in the whole model; `local`: of its
    own losses.
    """
    score_tokens: Tokens = 16_384
    choose_seconds: Positive = 60.0
    """Then the best choice found is used."""
    costs: Text | None = None
    """A JSON file with seconds by variant, instead of measuring them here."""
    form: Literal["per_layer", "uniform", "padded"] | None = None
    """Of the model's folder. None: `uniform` if all layers are alike, else `per_layer`."""
    distill: PruneDistill | None = None
    """Train the models end to end with the teacher's probabilities."""
    sweep: tuple[dict[str, Any], ...] = ()
    """Runs with other keys under `prune`, one after another, each in a folder of its own below output_dir/sweep."""
    trust_remote_code: bool = False
    """Run the model code that the teacher's folder has."""

    @property
    def has_variants(self) -> bool:
        given = (self.intermediate_size, self.num_key_value_heads, self.experts, self.skip, self.copy)
        return any(given) or self.linear or bool(self.sweep) or self.hidden_size is not None


DEFAULTS: dict[str, Any] = {"learning_rate": 1e-3, "adam_beta2": 0.95, "warmup_ratio": 0.05}
"""Keys of a run whose default differs under `prune:`."""
