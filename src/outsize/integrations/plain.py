"""Reads checkpoints of transformers' plain Trainer, and keeps plain Trainer from continuing at an outsize checkpoint.

A plain checkpoint has the weights in Hugging Face's files, `optimizer.pt` (the state of torch's AdamW by position),
`scheduler.pt`, `rng_state.pth` and `trainer_state.json`. Where `optimizer.pt` is missing, plain Trainer starts with an
empty optimizer and says nothing. So an outsize checkpoint has an `optimizer.pt` that no optimizer accepts.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile
from outsize.checkpoint.folder import is_plain, newest
from outsize.model.weights import FileWeights

OPTIMIZER, SCHEDULER, NOTE = "optimizer.pt", "scheduler.pt", "outsize-checkpoint.md"
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
_FROM_WEIGHTS = (
    "To start from its weights alone, load the model from this folder with from_pretrained "
    "and leave resume_from_checkpoint out"
)
_TEXT = f"""# A checkpoint of outsize

Step {{step}}. The optimizer state is in `state.safetensors`, by parameter name; `outsize.json` lists every file.

- To continue training, with any `gpu_memory`: `outsize train run.yaml --resume`, or in Python
  `OutsizeTrainer(...).train(resume_from_checkpoint=<this folder>)`.
- To use the weights: `from_pretrained(<this folder>)`, for an adapter `PeftModel.from_pretrained(base, <this folder>)`,
  or `outsize export`.
- transformers' plain `Trainer` cannot continue from this folder: it cannot read this form of optimizer state.
  `{OPTIMIZER}` holds no state. It is there so that plain `Trainer` stops ("different number of parameter groups")
  instead of continuing with an empty optimizer. To train the weights further with plain `Trainer`, load the model with
  `from_pretrained` and leave `resume_from_checkpoint` out.
"""


# Reading a plain checkpoint.


def newest_of_both(parent: Path) -> Path | None:
    """The checkpoint of the latest step, of outsize or of plain Trainer."""
    found = [
        path for path in parent.glob("checkpoint-*") if is_plain(path) and re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    return max(
        (path for path in (newest(parent), *found) if path is not None),
        key=lambda path: int(path.name.rpartition("-")[2]),
        default=None,
    )


def require_plain(folder: Path) -> None:
    """Raise unless training can continue from the folder."""
    for name in (OPTIMIZER, SCHEDULER):
        if not (folder / name).is_file():
            raise BadFile(
                f"{folder}: {name} is missing, so training cannot continue from it (save_only_model?). {_FROM_WEIGHTS}."
            )


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load weights into a model on the CPU that is not prepared. All parameters are required."""
    weights = FileWeights(folder, model)
    try:
        weights.require_whole()
        weights.fill_buffers(model)
        with torch.no_grad():
            for name, param in model.named_parameters():
                weights.read_into(name, param.data)
    finally:
        weights.close()


def training_state(folder: Path, groups: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of optimizer and scheduler, in the engine's form. `groups`: the engine's."""
    saved = _read(folder / OPTIMIZER)
    return _optimizer_state(folder, saved, groups), _scheduler_state(folder, saved)


def _optimizer_state(folder: Path, saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of torch's AdamW, in the order of the groups.

    Moments become fp32, exactly. A bf16 weight is its own fp32 master.
    """
    if (
        "outsize" in saved
        or not isinstance(saved.get("state"), dict)
        or not isinstance(saved.get("param_groups"), list)
    ):
        raise BadFile(f"{folder / OPTIMIZER} holds no optimizer state. Name another checkpoint. {_FROM_WEIGHTS}.")
    theirs = [
        group for group in saved["param_groups"] if group["params"]
    ]  # Trainer has a group for what does not decay, also if nothing is in it
    sizes, mine = [len(group["params"]) for group in theirs], [len(group["params"]) for group in groups]
    if sizes != mine:
        raise BadFile(
            f"{folder / OPTIMIZER} has groups of {sizes} parameters, this model has {mine}. "
            "Continue with the model that was trained, frozen in the same places."
        )
    for group in theirs:
        if wrong := [name for name in ("amsgrad", "maximize") if group.get(name)]:
            raise BadFile(
                f"{folder / OPTIMIZER} is of AdamW with {wrong[0]}=True, which outsize does not have. {_FROM_WEIGHTS}."
            )
    state: dict[int, dict[str, Tensor]] = {}
    made, number = [], 0
    for group, their_group in zip(groups, theirs, strict=True):
        for name, param, key in zip(group["param_names"], group["params"], their_group["params"], strict=True):
            if key in saved["state"]:
                state[number] = _state_of(folder, name, param, saved["state"][key])
            number += 1
        settings = {key: their_group[key] for key in _SETTINGS if key in their_group}
        settings["lr"] = float(settings["lr"])
        settings["betas"] = tuple(float(beta) for beta in settings["betas"])
        made.append({**settings, "params": list(range(number - len(group["params"]), number))})
    return {"state": state, "param_groups": made}


def _scheduler_state(folder: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """The scheduler's state without the values of empty groups, which the engine does not have."""
    is_empty = [not group["params"] for group in saved["param_groups"]]

    def kept(value: Any) -> Any:
        is_per_group = isinstance(value, list) and len(value) == len(is_empty)
        return [item for item, empty in zip(value, is_empty, strict=True) if not empty] if is_per_group else value

    return {name: kept(value) for name, value in _read(folder / SCHEDULER).items()}


def _state_of(folder: Path, name: str, param: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
    if saved.keys() - {"lo"} != _MOMENTS | {"step"}:  # `lo` is written by outsize.reference
        found = ", ".join(sorted(map(str, saved)))
        raise BadFile(
            f"{folder / OPTIMIZER} holds {found} for {name}, which is not the state of AdamW (exp_avg, exp_avg_sq, "
            f"step), the only one that outsize can load. {_FROM_WEIGHTS}."
        )
    for part in sorted(_MOMENTS):
        if saved[part].shape != param.shape:
            shapes = f"{tuple(saved[part].shape)} for {name}, which has the shape {tuple(param.shape)} here"
            raise BadFile(
                f"{folder / OPTIMIZER} holds an {part} of shape {shapes}. Continue with the model that was trained."
            )
    state = {
        "step": torch.as_tensor(saved["step"], dtype=torch.float32),
        **{part: saved[part].float() for part in _MOMENTS},
    }
    if param.dtype == torch.bfloat16:
        state["lo"] = saved.get("lo", torch.zeros(param.shape, dtype=torch.int16))
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BadFile(f"{path} cannot be read: {str(error).splitlines()[0]}. Name another checkpoint.") from None
    if not isinstance(found, dict):
        raise BadFile(f"{path} holds a {type(found).__name__}, not a state dict. Name another checkpoint.")
    return found


# Writing beside an outsize checkpoint.


def write_notes(folder: Path, *, step: int, scheduler: Any = None) -> None:
    """Write the note for users, and the files that stop plain Trainer. `scheduler`: None without optimizer state."""
    text = _TEXT.format(step=step)
    (folder / NOTE).write_text(text)
    if scheduler is not None:
        torch.save({"outsize": text, "state": {}, "param_groups": []}, folder / OPTIMIZER)
        torch.save(scheduler.state_dict(), folder / SCHEDULER)
