"""Models that a Trainer runs beside the one it trains: TRL's reference models and reward models.

TRL passes them to `accelerator.prepare_model(..., evaluation_mode=True)`, which would move them to the GPU outside of
any plan. Here each gets its own engine for forward passes. Its memory is part of the user's `gpu_memory` and
`host_memory`.
"""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.utils import AutocastKwargs
from torch import Tensor, nn

from outsize.base.errors import PlanInfeasible
from outsize.base.log import log
from outsize.base.units import parse_bytes, show_bytes
from outsize.model.packed_attention import BOUNDARIES
from outsize.runtime.engine import Engine
from outsize.setup.prepare import prepare_as, prepare_forward_only
from outsize.setup.request import PrepareRequest

if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object


Planned = TypeVar("Planned")


class OtherModel:
    """A model that only runs forward: its engine, from its construction until `stop`."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        batch: dict[str, Any],
        request: PrepareRequest,
        *,
        least: bool = False,
        only_weights: bool = False,
        beside_bytes: int = 0,
    ):
        """Plan and prepare it.

        Args:
            name: for messages.
            batch, request: those of the trained model.
            least: take as little GPU memory as possible.
            only_weights: budget its weights alone. The plan of the trained model includes its activations.
            beside_bytes: GPU memory that goes with it outside of its plan.
        """
        if (earlier := _RUNNING.pop(model, lambda: None)()) is not None:
            log.info("the engine of an earlier Trainer is detached from %s", name)
            earlier.stop()
        self.name, self._beside_bytes = name, beside_bytes
        self._trainable = [param for param in model.parameters() if param.requires_grad]
        model.requires_grad_(False)
        try:
            self.engine: Engine = prepare_forward_only(
                model, _inputs_of(model, batch), _run, request, least=least, only_weights=only_weights
            )
        except PlanInfeasible as error:
            self._unfreeze()
            taken = beside_bytes if error.resource == "gpu" else 0
            raise too_small(error, f"{name} alone needs", taken, request) from None
        except BaseException:
            self._unfreeze()
            raise
        self._is_running = True
        _RUNNING[model] = weakref.ref(self)
        homes = self.engine.plan.decision.homes
        streamed = sum(home.weights == "host" for home in homes)
        how = (
            f"{streamed} of its {len(homes)} chunks are streamed from the host"
            if streamed
            else "all of its weights stay on the GPU"
        )
        log.info("%s takes %s of gpu_memory: %s", name, show_bytes(self.gpu_bytes), how)

    @property
    def gpu_bytes(self) -> int:
        return self.engine.plan.gpu_budget_bytes + self._beside_bytes

    @property
    def host_bytes(self) -> int:
        return self.engine.plan.estimate.host_bytes

    def stop(self) -> None:
        """Return the model to the CPU, trainable as before."""
        if self._is_running:
            self._is_running = False
            self.engine.detach()
            self._unfreeze()

    def _unfreeze(self) -> None:
        for param in self._trainable:
            param.requires_grad_(True)


_RUNNING: "weakref.WeakKeyDictionary[nn.Module, Callable[[], OtherModel | None]]" = weakref.WeakKeyDictionary()
"""By model. The next Trainer that uses the same model ends it."""


class RunsOthers(_Trainer):
    """The part of `OutsizeMixin` that keeps other models off the GPU until they are planned for."""

    _others: "dict[str, nn.Module] | None" = None
    """By their names in messages."""
    _is_online: bool
    """Batches are generated, and other models run then, not in the loss."""
    _running: "tuple[OtherModel, ...]" = ()
    _beside_bytes = 0
    """GPU memory that goes with each other model outside of its plan."""
    others_bytes = (0, 0)
    """GPU and host memory of the other models under the last plan."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        place = self.accelerator.prepare_model

        def prepare_model(
            model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
        ) -> nn.Module:
            if evaluation_mode and model is not self.model:
                self._others = self._others or {}
                if not any(other is model for other in self._others.values()):
                    self._others[self._name_of(model)] = model
                device_placement = False
                without_autocast_cache(self.accelerator)
            return place(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

        self.accelerator.prepare_model = prepare_model

    def _name_of(self, model: nn.Module) -> str:
        is_reward = any(model is func for func in getattr(self, "reward_funcs", ()))
        is_reference = model is getattr(self, "ref_model", None)
        word = "the reference model" if is_reference else "the reward model" if is_reward else type(model).__name__
        count = sum(name.startswith(word) for name in self._others or {})
        return f"{word} {count + 1}" if count else word

    def _prepare_with_others(self, batch: dict[str, Any], request: PrepareRequest) -> Engine:
        """Prepare the trained model in the memory that the others leave."""
        return self._beside_others(batch, request, lambda left: prepare_as(self.model, batch, left))

    def _beside_others(
        self, batch: dict[str, Any], request: PrepareRequest, plan: Callable[[PrepareRequest], Planned]
    ) -> Planned:
        """Start the other models and plan with the request that has the memory they leave. If that does not fit, they
        use less. They run until `_stop_others`.
        """
        if not self._others:
            return plan(request)
        try:
            return self._try_beside(batch, request, plan, least=False)
        except PlanInfeasible as error:
            why = str(error)
        log.info("planning again with as little GPU memory as possible for the other models: %s", why)
        return self._try_beside(batch, request, plan, least=True)

    def _try_beside(
        self, batch: dict[str, Any], request: PrepareRequest, plan: Callable[[PrepareRequest], Planned], *, least: bool
    ) -> Planned:
        self._start_others(batch, request, least=least)
        try:
            return plan(self._left_by_others(request))
        except PlanInfeasible as error:
            taken = sum(other.gpu_bytes if error.resource == "gpu" else other.host_bytes for other in self._running)
            parts = [
                f"{other.name} needs {show_bytes(other.gpu_bytes if error.resource == 'gpu' else other.host_bytes)}"
                for other in self._running
            ]
            words = f"{', '.join(parts)}, the trained model {show_bytes(error.needed_bytes)}, together"
            self._stop_others()
            raise too_small(error, words, taken, request) from None
        except BaseException:
            self._stop_others()
            raise

    def _start_others(self, batch: dict[str, Any], request: PrepareRequest, *, least: bool) -> None:
        self._stop_others()
        left = request
        try:
            for name, model in (self._others or {}).items():
                self._running = (
                    *self._running,
                    OtherModel(
                        model,
                        name,
                        batch,
                        left,
                        least=least,
                        only_weights=self._is_in_main_plan(model),
                        beside_bytes=self._beside_bytes,
                    ),
                )
                left = self._left_by_others(request)
            self.others_bytes = (
                sum(other.gpu_bytes for other in self._running),
                sum(other.host_bytes for other in self._running),
            )
        except BaseException:
            self._stop_others()
            raise

    def _is_in_main_plan(self, model: nn.Module) -> bool:
        """Whether the plan of the trained model includes this one's activations.

        It does if the loss, and so the profiling run, runs this model. In online training, a reference model runs
        before the training forward, on the same rows, and needs no more memory.
        """
        return not self._is_online or model is getattr(self, "ref_model", None)

    def _stop_others(self) -> None:
        others, self._running = self._running, ()
        for other in others:
            other.stop()

    def _left_by_others(self, request: PrepareRequest) -> PrepareRequest:
        """The request less the memory of the other models. A size of None stays None: free memory then decides."""
        gpu_memory, host_memory = request.gpu_memory, request.host_memory
        if gpu_memory is not None:
            taken = sum(other.gpu_bytes for other in self._running)
            gpu_memory = max(1, parse_bytes(gpu_memory, name="gpu_memory") - taken)
        if host_memory is not None:
            taken = sum(other.host_bytes for other in self._running)
            host_memory = max(1, parse_bytes(host_memory, name="host_memory") - taken)
        return replace(request, gpu_memory=gpu_memory, host_memory=host_memory)


def too_small(error: PlanInfeasible, words: str, taken: int, request: PrepareRequest) -> PlanInfeasible:
    """`taken`: memory of other models, in addition to what the error requires."""
    name, needed = f"{error.resource}_memory", error.needed_bytes + taken
    given = request.gpu_memory if error.resource == "gpu" else request.host_memory
    allowed = parse_bytes(given, name=name) if given is not None else error.allowed_bytes + taken
    message = (
        f"{name} {show_bytes(allowed)} is too small: {words} at least {show_bytes(needed)} ({needed} bytes). "
        f"Raise {name}, or reduce the batch size or the sequence length."
    )
    return PlanInfeasible(message, resource=error.resource, allowed_bytes=allowed, needed_bytes=needed)


def without_autocast_cache(accelerator: Any) -> None:
    """The autocast cache would keep a cast of every weight."""
    accelerator.autocast_handler = replace(accelerator.autocast_handler or AutocastKwargs(), cache_enabled=False)


def _run(model: nn.Module, batch: dict[str, Any]) -> None:
    """Not under no_grad, which profiling ignores. Nothing in the model requires grad."""
    model(**batch)


def _inputs_of(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The inputs with which TRL's losses call a reference model, for a batch of the trained model."""
    known = inspect.signature(type(model).forward).parameters
    kept = {name: value for name, value in batch.items() if name in {*known, *BOUNDARIES} - {"labels"}}
    ids = kept.get("input_ids")
    if not isinstance(ids, Tensor):
        return kept
    config = getattr(model, "config", None)
    vocab = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    if vocab:  # a reward model may have a smaller vocabulary
        kept["input_ids"] = ids.remainder(vocab)
    if _has_fused_head(model):
        kept |= {"labels": kept["input_ids"].clone(), "fused_lm_head": True}
    return {**kept, "use_cache": False} if "use_cache" in known else kept


def _has_fused_head(model: nn.Module) -> bool:
    """Whether TRL has patched the forward to take `fused_lm_head`, which its signature does not show."""
    patched: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    function: Any = getattr(patched, "_original_forward", patched.forward)
    while function is not None:
        inner = getattr(function, "__func__", function)
        if "fused_lm_head" in getattr(getattr(inner, "__code__", None), "co_varnames", ()):
            return True
        function = getattr(inner, "__wrapped__", None)
    return False
