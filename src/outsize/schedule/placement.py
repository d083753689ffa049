"""Placement: every buffer that a decision allocates for the whole run, by name and size.

The planner sums the sizes and the runtime allocates the same buffers. A buffer's name is
a pair such as (SLOT, 2) or (HOME, 7); actions refer to the buffers they read and write by the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outsize.layout.chunks import Chunk, ChunkLayout, Piece
from outsize.layout.coordinates import ChunkConstants
from outsize.layout.norm import norm_parts
from outsize.layout.optimizer import ChunkUpdate
from outsize.layout.slots import SlotMap, assign_slots, call_intervals, turn_intervals
from outsize.model.graph import BlockGraph
from outsize.model.work import SharedTensor, Work
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.plan import Decision, StepConfig

STAGE_DEPTH = 1
"""One block's gradients can be copied out while the next block's are computed."""
CONSTANTS_DEPTH = 1
"""One chunk's constants can be copied in while those before it are used."""
STATE_DEPTH = 1
"""One chunk's state can be copied in while the state before it is copied out."""
RETURN_SLOTS = 2
"""One call's activations can be loaded while another's are used."""


@dataclass(frozen=True)
class Placement:
    graph: BlockGraph
    layout: ChunkLayout
    decision: Decision
    step_config: StepConfig
    work: tuple[Work, ...]
    shared: tuple[SharedTensor, ...] = ()

    def chunk(self, index: int) -> Chunk:
        return self.layout.chunks[index]

    # Bytes of a chunk in its buffers.

    def home_bytes(self, index: int) -> int:
        """Bytes of the weights in their home; a load copies as many."""
        return self.chunk(index).nbytes

    def slot_bytes(self, index: int) -> int:
        """Bytes of the weights that compute reads, in a slot or resident."""
        return self.chunk(index).nbytes

    def state_bytes(self, index: int) -> int:
        return self.update_of(index).state_bytes

    def gradient_bytes(self, index: int) -> int:
        return self.update_of(index).gradient_bytes

    # What the decision says about a chunk.

    def streams(self, index: int) -> bool:
        return self.decision.homes[index].weights == "host"

    @cached_property
    def _updates(self) -> tuple[ChunkUpdate | None, ...]:
        return tuple([self.step_config.update_of(chunk) for chunk in self.layout.chunks])

    def update_of(self, index: int) -> ChunkUpdate:
        """The update of a chunk that is not frozen."""
        update = self._updates[index]
        assert update is not None, f"chunk {index} is frozen"
        return update

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """The chunks that are not frozen."""
        return tuple([index for index, update in enumerate(self._updates) if update is not None])

    @cached_property
    def updated_pieces(self) -> dict[str, Piece]:
        """By trained parameter: its range in the gradient and the state tensors of its chunk."""
        return {piece.name: piece for chunk in self.updated for piece in self.update_of(chunk).pieces}

    def updated_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter's gradient and state tensors."""
        coordinates = self.step_config.coordinates.get(name)
        return self.graph.param[name].shape if coordinates is None else coordinates.shape

    def updated_numel(self, name: str) -> int:
        coordinates = self.step_config.coordinates.get(name)
        return self.graph.param[name].numel if coordinates is None else coordinates.numel

    @property
    def _updated_numels(self) -> Sequence[int]:
        if not self.step_config.coordinates:
            return self.graph.trainable_numels
        return [self.updated_numel(p.name) for p in self.graph.params if p.trainable]

    def is_updated(self, index: int) -> bool:
        return self._updates[index] is not None

    def has_split_masters(self, index: int) -> bool:
        """Whether the state has the lower halves of the chunk's fp32 masters."""
        return self.is_updated(index) and self.update_of(index).is_split

    def has_host_state(self, index: int) -> bool:
        return self.is_updated(index) and self.decision.homes[index].state == "host"

    def updates_on_host(self, index: int) -> bool:
        return self.is_updated(index) and self.decision.homes[index].update == "host"

    def streams_state(self, index: int) -> bool:
        """Whether optimizer state is copied to the GPU for the update, and back."""
        return (
            self.decision.homes[index].streams_state
            and self.is_updated(index)
            and self.update_of(index).state_bytes > 0
        )

    def has_coordinates(self, index: int) -> bool:
        """Whether a method trains the chunk in coordinates (layout/coordinates.py)."""
        return self.chunk(index).updated == "coordinates"

    def constants_of(self, index: int) -> ChunkConstants:
        constants = self.update_of(index).constants
        assert constants is not None, f"chunk {index} has no coordinates"
        return constants

    def streams_constants(self, index: int) -> bool:
        """Whether the constants are on the host, and copied to the GPU for contract and merge."""
        return self.has_coordinates(index) and self.has_host_state(index)

    def has_host_weights(self, index: int) -> bool:
        """Whether the host holds the weights: they are streamed, or updated on the host and copied to the device."""
        return self.streams(index) or (self.updates_on_host(index) and not self.has_coordinates(index))

    @cached_property
    def is_plain(self) -> bool:
        """Whether everything lives on the GPU, nothing is recomputed and gradients are kept until the step, as in a run
        without outsize.
        """
        stays = all(homes.weights == homes.state == "gpu" for homes in self.decision.homes)
        elementwise = not any(map(self.has_coordinates, range(len(self.layout.chunks))))
        return stays and elementwise and self.step_config.hold_gradients and set(self.decision.strategies) <= {"keep"}

    @cached_property
    def has_launch_times(self) -> bool:
        """Whether launch times were measured or estimated."""
        return any(work.forward_launch_seconds for work in self.work)

    @cached_property
    def slots(self) -> SlotMap:
        sizes = {c.index: self.slot_bytes(c.index) for c in self.layout.chunks if self.streams(c.index)}
        return assign_slots(call_intervals(self.layout, sizes, self.decision.depth), sizes)

    @cached_property
    def grad_complete_at(self) -> dict[int, int]:
        """By updated chunk: the call in whose backward its gradient is complete, summed over all uses."""
        completes = {}
        for chunk in map(self.chunk, self.updated):
            name = chunk.pieces[0].name
            # A parameter that no call reads belongs to the last one.
            backward = (
                self.graph.backward_users[name]
                if self.graph.users[name]
                else [v for v in chunk.calls if self.graph.has_backward[v]]
            )
            if backward:
                completes[chunk.index] = backward[0]
        return completes

    @cached_property
    def grads_completed_by(self) -> dict[int, tuple[int, ...]]:
        table: dict[int, list[int]] = {}
        for chunk, call in self.grad_complete_at.items():
            table.setdefault(call, []).append(chunk)
        return {call: tuple(chunks) for call, chunks in table.items()}

    def uses_stage(self, index: int) -> bool:
        """Whether the gradient uses a stage, which chunks share, and not a buffer of its own on the device."""
        return self.has_host_state(index) or (self.is_updated(index) and not self.step_config.hold_gradients)

    @cached_property
    def stages(self) -> SlotMap:
        sizes = {c: self.gradient_bytes(c) for c in self.grad_complete_at if self.uses_stage(c)}
        return assign_slots(call_intervals(self.layout, sizes, STAGE_DEPTH), sizes)

    @cached_property
    def in_update_order(self) -> tuple[int, ...]:
        """The chunks that a step updates, in forward order: the next forward needs the first ones first."""
        return tuple(sorted(self.grad_complete_at, key=lambda c: (self.chunk(c).calls[0], c)))

    @cached_property
    def state_slots(self) -> SlotMap:
        sizes = {c: self.state_bytes(c) for c in self.in_update_order if self.streams_state(c)}
        return assign_slots(turn_intervals(list(sizes), STATE_DEPTH), sizes)

    @cached_property
    def constants_slots(self) -> SlotMap:
        sizes = {c: self.constants_of(c).num_bytes for c in self.in_update_order if self.streams_constants(c)}
        return assign_slots(turn_intervals(list(sizes), CONSTANTS_DEPTH), sizes)

    @cached_property
    def coordinates_slots(self) -> SlotMap:
        """For coordinates that the host updates."""
        on_host = [c for c in self.in_update_order if self.has_coordinates(c) and self.updates_on_host(c)]
        sizes = {c: self.constants_of(c).coordinate_bytes for c in on_host}
        return assign_slots(turn_intervals(on_host, CONSTANTS_DEPTH), sizes)

    @cached_property
    def streamed_state_bytes(self) -> int:
        return sum(map(self.state_bytes, self.state_slots.slot_of))

    @cached_property
    def host_update_bytes(self) -> int:
        """Bytes that the host's updates of one step read and write."""
        return sum(self.update_of(c).traffic_bytes for c in self.grad_complete_at if self.updates_on_host(c))

    @cached_property
    def arrivals(self) -> dict[int, int]:
        """By chunk: the arrival slot of its gradient, for gradients that are contracted or whose sum waits on the host.
        All others arrive in their sum. Only the compute lane uses these slots, so block calls can share them.
        """
        has_sums = self.step_config.accumulate > 1
        slot_of = {}
        for chunks in self.grads_completed_by.values():
            apart = [c for c in chunks if self.has_coordinates(c) or (has_sums and self.sends_gradient(c))]
            apart.sort(key=lambda c: -self.chunk(c).nbytes)
            slot_of.update({chunk: slot for slot, chunk in enumerate(apart)})
        return slot_of

    @cached_property
    def updated_after_backward(self) -> frozenset[int]:
        """Chunks whose update a backward with updates defers until the last gradient has arrived on the host. See
        [Note: Which update comes when].
        """
        if self.step_config.update != "in_backward":
            return frozenset()
        on_host = [
            c
            for call in sorted(self.grads_completed_by, reverse=True)
            for c in self.grads_completed_by[call]
            if self.updates_on_host(c)
        ]
        return frozenset(c for i, c in enumerate(on_host) if i % self.decision.host_update_interval)

    def has_host_gradient(self, index: int) -> bool:
        """Whether a gradient on the host has a buffer of its own, which holds it until its update."""
        return self.step_config.hold_gradients or index in self.updated_after_backward

    def sends_gradient(self, index: int) -> bool:
        """Whether the gradient is copied to the host. With streamed state, only if it is kept there until the step."""
        return self.updates_on_host(index) or (self.has_host_state(index) and self.step_config.hold_gradients)

    @cached_property
    def sending_calls(self) -> tuple[int, ...]:
        """Calls that offload activations to the host, in forward order."""
        return tuple(v for v, w in enumerate(self.work) if w.sent_bytes and self.graph.has_backward[v])

    @cached_property
    def return_slot(self) -> dict[int, int]:
        return {call: i % RETURN_SLOTS for i, call in enumerate(reversed(self.sending_calls))}

    @cached_property
    def gpu(self) -> dict[Buffer, int]:
        """Device buffers and their bytes."""
        buffers: dict[Buffer, int] = {}
        for chunk in self.layout.chunks:
            i = chunk.index
            if not self.streams(i):
                buffers[B.WEIGHTS, i] = self.slot_bytes(i)
            if self.is_updated(i) and not self.has_host_state(i):
                buffers[B.STATE, i] = self.state_bytes(i)
                if self.has_coordinates(i):
                    buffers[B.CONSTANTS, i] = self.constants_of(i).num_bytes
                if self.step_config.hold_gradients:
                    buffers[B.GRADIENT, i] = self.gradient_bytes(i)
        buffers.update({(B.SLOT, s): size for s, size in enumerate(self.slots.slot_bytes)})
        buffers.update({(B.STATE_SLOT, s): size for s, size in enumerate(self.state_slots.slot_bytes)})
        buffers.update({(B.CONSTANTS_SLOT, s): size for s, size in enumerate(self.constants_slots.slot_bytes)})
        buffers.update({(B.COORDINATES_SLOT, s): size for s, size in enumerate(self.coordinates_slots.slot_bytes)})
        buffers.update({(B.STAGE, s): size for s, size in enumerate(self.stages.slot_bytes)})
        for index, slot in self.arrivals.items():
            buffers[B.ARRIVAL, slot] = max(buffers.get((B.ARRIVAL, slot), 0), self.chunk(index).nbytes)
        for call, slot in self.return_slot.items():
            buffers[B.RETURN, slot] = max(buffers.get((B.RETURN, slot), 0), self.work[call].sent_bytes)
        if numels := self._updated_numels:
            buffers[B.NORMS, 0] = sum(norm_parts(numels))
        if scratch := self._scratch_bytes(on_host=False):
            buffers[B.SCRATCH, 0] = scratch
        return buffers

    def _scratch_bytes(self, *, on_host: bool) -> int:
        """Workspace of the updates at one site, which run one at a time; on the GPU, of contractions and merges too."""
        chunks = [c for c in self.updated if self.updates_on_host(c) == on_host]
        updates = max((self.update_of(c).scratch_bytes for c in chunks), default=0)
        merged = [] if on_host else [c for c in self.updated if self.has_coordinates(c)]
        return max(updates, max((self.constants_of(c).scratch_bytes for c in merged), default=0))

    @cached_property
    def host(self) -> dict[Buffer, int]:
        """Host buffers and their bytes."""
        buffers: dict[Buffer, int] = {}
        for chunk in self.layout.chunks:
            i = chunk.index
            if self.has_host_weights(i):
                buffers[B.HOME, i] = self.home_bytes(i)
            if self.has_host_state(i):
                buffers[B.HOST_STATE, i] = self.state_bytes(i)
                if self.has_coordinates(i):
                    buffers[B.HOST_CONSTANTS, i] = self.constants_of(i).num_bytes
                if self.has_host_gradient(i):
                    buffers[B.HOST_GRADIENT, i] = self.gradient_bytes(i)
        passed_through = {
            self.stages.slot_of[c]
            for c in self.grad_complete_at
            if self.updates_on_host(c) and not self.has_host_gradient(c)
        }
        buffers.update({(B.HOST_STAGE, s): self.stages.slot_bytes[s] for s in passed_through})
        buffers.update({(B.ARENA, v): self.work[v].sent_bytes for v in self.sending_calls})
        if scratch := self._scratch_bytes(on_host=True):
            buffers[B.HOST_SCRATCH, 0] = scratch
        return buffers

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu.values()) + self.graph.buffer_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def parts(self, buffers: dict[Buffer, int]) -> dict[str, int]:
        total: dict[str, int] = {}
        for (kind, _), size in buffers.items():
            total[str(kind)] = total.get(str(kind), 0) + size
        return total

    def is_pinned(self, buffer: Buffer) -> bool:
        """Whether a host buffer is pinned and only accessed by copies to or from the GPU."""
        kind, index = buffer
        is_copied = kind == B.HOST_STATE and (self.streams_state(index) or self.has_coordinates(index))
        return kind.is_pinned_for_copies or is_copied

    # The buffers of an action.

    def weights_buffer(self, index: int) -> Buffer:
        """The weights that compute reads."""
        return (B.SLOT, self.slots.slot_of[index]) if self.streams(index) else (B.WEIGHTS, index)

    def home_buffer(self, index: int) -> Buffer:
        """The weights between uses."""
        return (B.HOME if self.has_host_weights(index) else B.WEIGHTS, index)

    def gradient_buffer(self, index: int) -> Buffer:
        """The device buffer with the gradient, summed over the micro-batches so far."""
        return (B.STAGE, self.stages.slot_of[index]) if self.uses_stage(index) else (B.GRADIENT, index)

    def state_slot(self, index: int) -> Buffer:
        """The buffer on the device that holds streamed state during the update."""
        return (B.STATE_SLOT, self.state_slots.slot_of[index])

    def state_buffer(self, index: int) -> Buffer:
        """The buffer with the state of an update on the GPU."""
        return self.state_slot(index) if self.streams_state(index) else (B.STATE, index)

    def constants_buffer(self, index: int) -> Buffer:
        """The buffer with the constants that contract and merge read."""
        is_streamed = self.streams_constants(index)
        return (B.CONSTANTS_SLOT, self.constants_slots.slot_of[index]) if is_streamed else (B.CONSTANTS, index)

    def coordinates_buffer(self, index: int) -> Buffer:
        """The buffer that begins with the updated coordinates, for the merge."""
        is_slot = self.updates_on_host(index)
        return (B.COORDINATES_SLOT, self.coordinates_slots.slot_of[index]) if is_slot else self.state_buffer(index)

    def host_gradient_buffer(self, index: int) -> Buffer:
        return (B.HOST_GRADIENT, index) if self.has_host_gradient(index) else (B.HOST_STAGE, self.stages.slot_of[index])
