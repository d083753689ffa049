"""`OffloadTrainer`: transformers' Trainer with activations offloaded, and `OffloadMixin` for other Trainer classes.

No engine and no plan: the optimizer, and where the weights are, stay the Trainer's.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from outsize.activation.layer_offload import LayerOffload
from outsize.base.errors import ConfigError
from outsize.model.offloading import OFFLOADING
from outsize.setup.activation_offload import offload_activations

if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object


class OffloadMixin(_Trainer):
    """Put it before a Trainer class: `class MyTrainer(OffloadMixin, SFTTrainer): pass`.

    Args beside the Trainer's own:
        activation_offloading: "hidden_states", True, "legacy", "disk" or False (docs/long-context.md).
        save_attention: with "hidden_states", also offload the outputs of attention, which is then computed once.
        offload_folder: where the files of "disk" are. Default: the folder of temporary files.
        host_memory: limit of the pinned host memory of the others, such as "64GiB".
    """

    offload: LayerOffload | None = None
    """The handle while `train` runs, and after it."""

    def __init__(
        self,
        *args: Any,
        activation_offloading: str | bool = "hidden_states",
        save_attention: bool = False,
        offload_folder: str | Path | None = None,
        host_memory: str | int | None = None,
        **kwargs: Any,
    ):
        name = str(activation_offloading).lower() if isinstance(activation_offloading, bool) else activation_offloading
        if name not in {*OFFLOADING, "false"}:
            plan = " The plan of OutsizeTrainer decides by itself; here there is none." if name == "auto" else ""
            raise ConfigError(
                f"activation_offloading={activation_offloading!r} is unknown here.{plan} Use one of True, False, "
                f"{', '.join(repr(other) for other in OFFLOADING if other != 'true')}."
            )
        wrong = []
        if save_attention and name != "hidden_states":
            wrong.append("save_attention is for 'hidden_states'")
        if offload_folder is not None and name != "disk":
            wrong.append("offload_folder is for 'disk'")
        if host_memory is not None and name in ("disk", "false"):
            wrong.append("host_memory is for the values that use host memory")
        if kwargs.get("model_init") is not None:
            wrong.append("model_init makes models after the offload is enabled: pass model")
        if wrong:
            raise ConfigError(f"activation_offloading={activation_offloading!r}: {'; '.join(wrong)}. Correct it.")
        super().__init__(*args, **kwargs)
        if name != "false" and getattr(self.args, "activation_offloading", False):
            raise ConfigError(
                "args.activation_offloading is TRL's own offload, beside activation_offloading of OffloadMixin. Leave "
                "one of them out."
            )
        self._offloading: Any = name
        self._offload_settings = {
            "save_attention": save_attention, "folder": offload_folder, "host_memory": host_memory
        }  # fmt: skip

    def train(self, *args: Any, **kwargs: Any) -> Any:
        enabled: AbstractContextManager[LayerOffload | None] = (
            nullcontext()
            if self._offloading == "false"
            else offload_activations(self.model, self._offloading, **self._offload_settings)
        )
        with enabled as self.offload:
            return super().train(*args, **kwargs)


class OffloadTrainer(OffloadMixin, Trainer):
    """transformers' Trainer with activations offloaded: `OffloadTrainer(model=…, args=…, train_dataset=…,
    activation_offloading="hidden_states")`.
    """
