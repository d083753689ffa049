"""Random generators and scheduler of a run, saved as JSON and safetensors (no pickle)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.base.errors import BadFile, SaveFailed
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.device.device import Device
from outsize.device.rng import HostRng

_RNG, _RNG_TENSORS, _SCHEDULER = "rng.json", "rng.safetensors", "scheduler.json"


def save_rng(folder: Path, device: Device) -> None:
    host = HostRng.now()
    kind, keys, position, has_gauss, gauss = host.numpy
    tensors = {"numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)), "torch": host.torch}
    if (own := device.rng_state()) is not None:
        tensors["device"] = own.cpu()
    with TensorFile.create(folder / _RNG_TENSORS, {name: TensorSpec.of(t) for name, t in tensors.items()}, {}) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    facts = {"python": host.python, "numpy": [kind, int(position), int(has_gauss), float(gauss)]}
    (folder / _RNG).write_text(json.dumps(facts))


def load_rng(folder: Path, device: Device) -> None:
    facts = read_json(folder / _RNG)
    with TensorFile(folder / _RNG_TENSORS) as file:
        tensors: dict[str, Tensor] = {name: file.read(name) for name in file.entries}
    version, words, normal = facts["python"]
    kind, *rest = facts["numpy"]
    HostRng(
        (version, tuple(words), normal), (kind, tensors["numpy"].numpy().astype(np.uint32), *rest), tensors["torch"]
    ).restore()
    if "device" in tensors and device.rng_state() is not None:  # else it resumes on another kind of device
        device.set_rng_state(tensors["device"])


def save_scheduler(folder: Path, scheduler: Any) -> None:
    try:
        text = json.dumps(scheduler.state_dict())
    except TypeError as error:
        raise SaveFailed(
            f"{type(scheduler).__name__}: its state cannot be written as JSON ({error}). Use one of transformers' "
            "schedulers, or save_only_model=True."
        ) from None
    (folder / _SCHEDULER).write_text(text)


def load_scheduler(folder: Path, scheduler: Any) -> None:
    scheduler.load_state_dict(read_json(folder / _SCHEDULER))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} cannot be read: {error}. Use another checkpoint.") from None
