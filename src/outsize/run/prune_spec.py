"""PruneSpec: everything that the bits of a pruning run depend on, complete before anything runs.

Defaults are filled in, random choices are drawn, and teacher and data are named by their content. A later run in the
same folder must have the same spec, apart from a larger budget and other variants. Memory, folders and layers are no
part of it.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outsize.base.cache_folder import write_whole
from outsize.base.errors import BadFile, ConfigError
from outsize.base.records import dumps, fingerprint, loads, to_json
from outsize.config.prune import PruneConfig
from outsize.config.run import RunConfig
from outsize.run.inputs import BatchOrder, data_seed

SPEC_FILE = "spec.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneSpec:
    """A field is a key of the run file of the same name, or says what it is."""

    teacher: str
    """A hash of its config and weight files."""
    data: str
    """A hash of the rows that are trained on."""
    validation_data: str | None
    overrides_of_model_config: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    bf16: bool
    attn_implementation: str | None
    sequence_len: int
    sample_packing: bool
    pad_to_sequence_len: bool
    train_sampling_strategy: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    seed: int
    """Of the order of rows: `data_seed`, or `seed`."""
    learning_rate: float
    lr_scheduler: str
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: float
    """Steps, or a share of all."""
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    nonfinite: str
    learn: tuple[str, ...]
    loss: str
    importance: str
    importance_tokens: int
    blocks: str | None
    subblocks: dict[str, str] | None
    keep: str
    tokens: int
    """The budget."""
    steps: int
    """Optimizer steps of the budget."""
    variants: tuple[str, ...] = ()
    """Names of the variants of all layers, in order."""
    hidden_size: int | None = None

    @property
    def fingerprint(self) -> str:
        """Of what a later run in the same folder must have too."""
        values = to_json(replace(self, tokens=0, steps=0, variants=()))
        if self.hidden_size is None:  # libraries that are older than this key stay valid
            del values["hidden_size"]
        return fingerprint(values)


_FREE = ("tokens", "steps", "variants")
_NAMES = {"teacher": "base_model", "data": "datasets", "validation_data": "validation data"}
_OF_PRUNE = {field.name for field in fields(PruneConfig)}


def prune_spec(
    config: RunConfig, *, teacher: str, data: str, validation_data: str | None, order: BatchOrder, num_batches: int
) -> PruneSpec:
    """`config`: with its micro-batch. `order`, `num_batches`: of the budget."""
    prune, passes = config.prune, config.gradient_accumulation_steps
    assert prune is not None and passes is not None and config.micro_batch_size is not None
    named = {field.name for field in fields(RunConfig)} & {field.name for field in fields(PruneSpec)}
    values = {name: getattr(config, name) for name in named}
    values |= {name: getattr(prune, name) for name in _OF_PRUNE & {field.name for field in fields(PruneSpec)}}
    values |= dict(
        teacher=teacher,
        data=data,
        validation_data=validation_data,
        seed=data_seed(config),
        warmup_steps=float(config.warmup_steps or config.warmup_ratio or 0),
        learn=tuple(sorted(set(prune.learn))),
        keep=keep_of(config),
        steps=num_batches // passes,
        variants=(),
    )
    return PruneSpec(**values)


def keep_of(config: RunConfig) -> str:
    assert config.prune is not None
    return config.prune.keep or ("best" if config.has_eval_data else "latest")


def require_same(folder: Path, now: PruneSpec) -> PruneSpec | None:
    """The spec in the folder of an earlier run, if there is one. Raises ConfigError if it differs in more than the
    budget and the variants, or if the budget is smaller.
    """
    path = folder / SPEC_FILE
    if not path.exists():
        return None
    try:
        then = loads(PruneSpec, path.read_text(), where=str(path))
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read ({error}). Restore it, or set another output_dir.") from None
    problems = [
        _problem(field.name, getattr(then, field.name), getattr(now, field.name))
        for field in fields(PruneSpec)
        if field.name not in _FREE and getattr(then, field.name) != getattr(now, field.name)
    ]
    if now.tokens < then.tokens:
        problems.append(
            f"prune.tokens was {then.tokens} and is {now.tokens}. A run can be made longer, not shorter: set it back."
        )
    if problems:
        head = f"{folder}: holds a library that was made with other settings."
        raise ConfigError("\n  ".join([head, *problems, "Or set another output_dir for a new library."]))
    return then


def write_spec(folder: Path, spec: PruneSpec) -> None:
    write_whole(folder / SPEC_FILE, dumps(spec))


def _problem(name: str, then: Any, now: Any) -> str:
    key = f"prune.{name}" if name in _OF_PRUNE else _NAMES.get(name, name)
    if name in _NAMES:
        what = "config or weights of the teacher" if name == "teacher" else "rows"
        return f"{key}: the {what} have changed since the run began. Restore them."
    return f"{key} was {_show(then)} and is {_show(now)}. Set it back."


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
