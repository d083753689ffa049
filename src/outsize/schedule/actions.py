"""Actions: the operations that a schedule consists of. `TYPES` is the only definition of what each kind of action does.

A record in `TYPES` defines the operand of a kind (a block call or a chunk), its lane, the buffers it reads and writes,
the bytes it moves and how the runtime performs it. Schedule, simulator, executor, memory ledger, calibration and report
use these records. Actions print as `F12` or `L3`; `parse_action` reads that form.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from outsize.base.errors import PlanInvalid
from outsize.hardware.lanes import Lane, compute_seconds, copy_seconds, update_seconds
from outsize.hardware.spec import HardwareSpec
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.placement import Placement


class Kind(StrEnum):
    """The kinds of actions, with the letters that plans, traces and reports show. `TYPES` describes them."""

    LOAD = "L"
    FORWARD = "F"
    OFFLOAD = "S"
    FREE = "R"
    RESTORE = "P"
    LOAD_GRADIENT = "Q"
    BACKWARD = "B"
    ADD = "E"
    LOAD_FOR_CONTRACT = "J"
    CONTRACT = "K"
    STORE_GRADIENT = "G"
    LOAD_STATE = "I"
    UPDATE = "U"
    STORE_STATE = "O"
    LOAD_CONSTANTS = "N"
    LOAD_COORDINATES = "D"
    MERGE = "M"
    WRITE_BACK = "W"


MATRIX_LAUNCHES = {Kind.CONTRACT: 4, Kind.MERGE: 8}
"""Launches of one weight, in units of `HardwareSpec.op_launch_seconds`. Counted: 6 and 16 operators, which take half of
that without the Python of a model's layers."""


class Action(NamedTuple):
    kind: Kind
    index: int  # type: ignore[assignment]  # hides tuple.index
    """A block call or a chunk: see `ActionType.operand`."""

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


class Effect(NamedTuple):
    """The lane of an action, and the buffers it reads and writes."""

    lane: Lane
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]


Operation = Literal["model", "copy", "offload", "free", "restore", "add", "update", "merge"]
"""How the runtime performs an action. `model`: the model's own code runs it. `copy`: the first buffer read is copied to
the first one written."""


@dataclass(frozen=True, slots=True)
class ActionType:
    label: str
    """For messages and charts, followed by the name of a block: `load the weights of`."""
    operand: Literal["call", "chunk"]
    operation: Operation
    group: str
    """The color in charts: see `BufferKind.group`."""
    effect: Callable[[Placement, int, bool], Effect]
    """Takes the operand, and whether the action belongs to a backward that updates."""
    num_bytes: Callable[[Placement, int], int]
    """Takes the operand. Bytes that the action copies or frees; 0 for compute."""

    @property
    def moves_activations(self) -> bool:
        return self.operand == "call" and self.operation != "model"


def parse_action(word: str) -> Action:
    match = re.fullmatch(r"([A-Z])(\d+)", word)
    if match is None or match[1] not in TYPES:
        raise PlanInvalid(f"{word!r} is no action such as F12 or L3. Write the schedule again with `str(schedule)`.")
    return Action(Kind(match[1]), int(match[2]))


def effect(place: Placement, action: Action, *, update_in_backward: bool = False) -> Effect:
    """The lane of an action and the buffers it reads and writes."""
    return TYPES[action.kind].effect(place, action.index, update_in_backward)


def action_seconds(place: Placement, action: Action, spec: HardwareSpec, lane: Lane) -> float:
    kind, i = action
    match TYPES[kind].operation:
        case "model":
            work = place.work[i]
            return work.forward_seconds if kind == Kind.FORWARD else work.backward_seconds
        case "free":
            return 0.0
        case "add":  # reads both, writes the sum, and reads it again for the norm
            traffic = place.chunk(i).nbytes + 3 * place.gradient_bytes(i)
            if kind == Kind.ADD:
                return update_seconds(spec, lane, traffic)
            constants = place.constants_of(i)
            return spec.launch_seconds + compute_seconds(
                spec, constants.contract_flops, traffic + constants.contract_bytes
            )
        case "merge":
            constants = place.constants_of(i)
            traffic = constants.num_bytes + constants.coordinate_bytes + place.chunk(i).nbytes
            return spec.launch_seconds + compute_seconds(spec, constants.merge_flops, traffic)
        case "update":
            seconds = update_seconds(spec, lane, place.update_of(i).traffic_bytes)
            return seconds * _host_slowdown(place, spec) if lane == "host" else seconds
        case "copy" | "offload" | "restore":
            return copy_seconds(spec, lane, TYPES[kind].num_bytes(place, i))


def _host_slowdown(place: Placement, spec: HardwareSpec) -> float:
    """Updates on the host take longer where they share the DRAM bandwidth with state that is streamed."""
    if not place.streamed_state_bytes:
        return 1.0
    traffic = place.host_update_bytes
    alone = update_seconds(spec, "host", traffic) - spec.launch_seconds
    return max(1.0, (traffic + 2 * place.streamed_state_bytes) / spec.host_bytes_per_second / alone)


def launch(place: Placement, action: Action, spec: HardwareSpec) -> tuple[float, bool]:
    """CPU seconds to launch an action (0 if unknown), and whether the CPU waits for the GPU in it."""
    kind, i = action
    operation = TYPES[kind].operation
    if not place.has_launch_times or operation == "free":
        return 0.0, False
    if kind in MATRIX_LAUNCHES:
        return MATRIX_LAUNCHES[kind] * len(place.chunk(i).pieces) * spec.op_launch_seconds, False
    if operation != "model":
        return spec.launch_seconds, False
    call = place.work[i]
    if kind == Kind.FORWARD:
        return call.forward_launch_seconds, call.forward_syncs_host
    return call.backward_launch_seconds, call.backward_syncs_host


def _sent_bytes(place: Placement, call: int) -> int:
    return place.work[call].sent_bytes


def _no_bytes(place: Placement, index: int) -> int:
    return 0


def _weights_of(place: Placement, call: int) -> tuple[Buffer, ...]:
    return tuple(place.weights_buffer(chunk) for chunk in place.layout.used_by(call))


def _forward(place: Placement, call: int, _: bool) -> Effect:
    return Effect("compute", _weights_of(place, call), ((B.LIVE, call),) if call in place.return_slot else ())


def _backward(place: Placement, call: int, _: bool) -> Effect:
    returned = ((B.RETURN, place.return_slot[call]),) if call in place.return_slot else ()
    completed = place.grads_completed_by.get(call, ())
    # Chunks with an arrival slot have their sum here too: the first micro-batch, and users' hooks, write it.
    gradients = tuple(place.gradient_buffer(chunk) for chunk in completed if not place.has_coordinates(chunk))
    arrivals = tuple((B.ARRIVAL, place.arrivals[chunk]) for chunk in completed if chunk in place.arrivals)
    norms = ((B.NORMS, 0),) if gradients else ()
    return Effect("compute", (*_weights_of(place, call), *returned), (*gradients, *arrivals, *norms))


def _add(place: Placement, chunk: int, _: bool) -> Effect:
    return Effect("compute", ((B.ARRIVAL, place.arrivals[chunk]),), (place.gradient_buffer(chunk), (B.NORMS, 0)))


def _contract(place: Placement, chunk: int, _: bool) -> Effect:
    reads = (B.ARRIVAL, place.arrivals[chunk]), place.constants_buffer(chunk)
    return Effect("compute", reads, (place.gradient_buffer(chunk), (B.NORMS, 0)))


def _update(place: Placement, chunk: int, update_in_backward: bool) -> Effect:
    # After the step, the clipping factor comes from all norms. In backward there is no clipping.
    norms = () if update_in_backward else ((B.NORMS, 0),)
    if place.updates_on_host(chunk):
        updated = B.HOST_STATE if place.has_coordinates(chunk) else B.HOME
        return Effect("host", (place.host_gradient_buffer(chunk), *norms), ((updated, chunk),))
    state = (place.state_buffer(chunk),) if place.streams_state(chunk) or place.has_coordinates(chunk) else ()
    weights = () if place.has_coordinates(chunk) else (place.weights_buffer(chunk),)
    return Effect("compute", (place.gradient_buffer(chunk), *norms), (*weights, *state))


def _merge(place: Placement, chunk: int, _: bool) -> Effect:
    reads = place.constants_buffer(chunk), place.coordinates_buffer(chunk)
    return Effect("compute", reads, (place.weights_buffer(chunk),))


def _write_back(place: Placement, chunk: int, _: bool) -> Effect:
    home, weights = (B.HOME, chunk), place.weights_buffer(chunk)
    is_updated_there = place.updates_on_host(chunk) and not place.has_coordinates(chunk)
    return Effect("h2d", (home,), (weights,)) if is_updated_there else Effect("d2h", (weights,), (home,))


def _load_constants(place: Placement, chunk: int, _: bool) -> Effect:
    return Effect("h2d", ((B.HOST_CONSTANTS, chunk),), (place.constants_buffer(chunk),))


TYPES: dict[Kind, ActionType] = {
    Kind.LOAD: ActionType(
        "load the weights of", "chunk", "copy", "slots",
        lambda place, i, _: Effect("h2d", ((B.HOME, i),), (place.weights_buffer(i),)), Placement.home_bytes,
    ),
    Kind.FORWARD: ActionType("forward of", "call", "model", "forward", _forward, _no_bytes),
    Kind.OFFLOAD: ActionType(
        "offload the activations of", "call", "offload", "activations",
        lambda place, i, _: Effect("d2h", ((B.LIVE, i),), ((B.ARENA, i),)), _sent_bytes,
    ),
    Kind.FREE: ActionType(
        "free the offloaded activations of", "call", "free", "activations",
        lambda place, i, _: Effect("compute", (), ((B.LIVE, i),)), _sent_bytes,
    ),
    Kind.RESTORE: ActionType(
        "load the activations of", "call", "restore", "activations",
        lambda place, i, _: Effect("h2d", ((B.ARENA, i),), ((B.RETURN, place.return_slot[i]),)), _sent_bytes,
    ),
    Kind.LOAD_GRADIENT: ActionType(
        "load the gradient sum of", "chunk", "copy", "gradients",
        lambda place, i, _: Effect("h2d", (place.host_gradient_buffer(i),), (place.gradient_buffer(i),)),
        Placement.gradient_bytes,
    ),
    Kind.BACKWARD: ActionType("backward of", "call", "model", "backward", _backward, _no_bytes),
    Kind.ADD: ActionType("add the gradient of", "chunk", "add", "gradients", _add, Placement.gradient_bytes),
    Kind.LOAD_FOR_CONTRACT: ActionType(
        "load the constants for the contraction of", "chunk", "copy", "constants", _load_constants,
        lambda place, i: place.constants_of(i).contract_bytes,
    ),
    Kind.CONTRACT: ActionType(
        "contract the gradient of", "chunk", "add", "gradients", _contract, Placement.gradient_bytes
    ),
    Kind.STORE_GRADIENT: ActionType(
        "store the gradient of", "chunk", "copy", "gradients",
        lambda place, i, _: Effect("d2h", (place.gradient_buffer(i),), (place.host_gradient_buffer(i),)),
        Placement.gradient_bytes,
    ),
    Kind.LOAD_STATE: ActionType(
        "load the optimizer state of", "chunk", "copy", "optimizer",
        lambda place, i, _: Effect("h2d", ((B.HOST_STATE, i),), (place.state_slot(i),)), Placement.state_bytes,
    ),
    Kind.UPDATE: ActionType("update", "chunk", "update", "optimizer", _update, Placement.slot_bytes),
    Kind.STORE_STATE: ActionType(
        "store the optimizer state of", "chunk", "copy", "optimizer",
        lambda place, i, _: Effect("d2h", (place.state_slot(i),), ((B.HOST_STATE, i),)), Placement.state_bytes,
    ),
    Kind.LOAD_CONSTANTS: ActionType(
        "load the constants of", "chunk", "copy", "constants", _load_constants,
        lambda place, i: place.constants_of(i).num_bytes,
    ),
    Kind.LOAD_COORDINATES: ActionType(
        "load the coordinates of", "chunk", "copy", "optimizer",
        lambda place, i, _: Effect("h2d", ((B.HOST_STATE, i),), (place.coordinates_buffer(i),)),
        lambda place, i: place.constants_of(i).coordinate_bytes,
    ),
    Kind.MERGE: ActionType(
        "make the weights of", "chunk", "merge", "weights", _merge, lambda place, i: place.constants_of(i).num_bytes
    ),
    Kind.WRITE_BACK: ActionType(
        "write the updated weights of", "chunk", "copy", "weights", _write_back, Placement.home_bytes
    ),
}  # fmt: skip
"""UPDATE runs at the chunk's update site; streamed state is in its slot by then. WRITE_BACK copies to the GPU (resident
weights, updated on the host) or to the host (streamed weights, updated on the GPU). ADD adds a gradient to the sum over
earlier micro-batches, between LOAD_GRADIENT and STORE_GRADIENT; CONTRACT does so for coordinates, in every
micro-batch. FREE waits for OFFLOAD, then frees the GPU memory."""
