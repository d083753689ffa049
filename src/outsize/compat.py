"""Every private name of torch, transformers and accelerate that outsize uses, with its purpose.

These names may change in any release. Those of torch are looked up when outsize is imported, those of other libraries
when they are first needed. One that is missing raises ImportError with its name and the versions that outsize was
tested with. Nothing else in outsize imports a private name. Attributes that all versions so far have in common and that
cannot be imported (`Tensor._version` and `_base`, `Module._parameters`, `_buffers` and `_modules`) are used where they
are needed; the private methods of `transformers.Trainer` that `OutsizeMixin` overrides are listed in TRAINER_METHODS.
"""

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

TESTED = {"torch": "2.11 to 2.13", "transformers": "5.17 to 5.22", "accelerate": "1.15"}
"""pyproject.toml has the bounds."""


def find(path: str) -> Any:
    """The object of a dotted path whose first parts are modules."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if length == 1 or not ".".join(parts[:length]).startswith(error.name or ""):
                raise
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                raise _missing(path)
            found = getattr(found, name)
        return found
    raise _missing(path)


def _missing(path: str) -> ImportError:
    library = path.split(".")[0]
    version = getattr(importlib.import_module(library), "__version__", "unknown")
    return ImportError(
        f"{path}: {library} {version} does not have it, and outsize needs it. Install a version that outsize was "
        "tested with: "
        f"{library} {TESTED.get(library, '')}."
    )


# torch: classes that are subclassed, by import statements so that type checkers know them.
try:
    from torch._subclasses import fake_tensor as fake_tensor  # profiles from a config alone (`outsize plan`)
    from torch.utils._python_dispatch import (
        TorchDispatchMode as TorchDispatchMode,
    )  # sees every operator: counts memory on `sim`, guards reads
except ImportError as error:
    raise ImportError(f"{error}. outsize needs it: install torch {TESTED['torch']}.") from error

# torch: the autograd graph.
next_node_number = find("torch.autograd._get_sequence_nr")
"""The number of the next autograd node: says in which block call a node was made."""
queue_backward_callback = find("torch.autograd.Variable")._execution_engine.queue_callback
"""Calls a function when the running backward ends."""
current_graph_task = find("torch._C._current_graph_task_id")
"""At least 0 while a backward runs."""
saved_tensors_hooks_in_force = find("torch._C._autograd._top_saved_tensors_default_hooks")
"""The hooks that autograd calls now for what it saves, or None."""

# torch: interception of operators.
without_torch_function = find("torch._C.DisableTorchFunctionSubclass")
"""Access to a parameter subclass without its `__torch_function__`."""
with_torch_function = find("torch._C._EnableTorchFunction")
"""Operators inside of `without_torch_function` on a tensor subclass that needs its own."""
current_dispatch_modes = find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
push_dispatch_mode = find("torch.utils._python_dispatch._push_mode")
pop_dispatch_mode = find("torch.utils._python_dispatch._pop_mode")
"""Modes that stay active between calls and can be removed from the middle of the stack."""
without_dispatch_modes = find("torch.utils._python_dispatch._disable_current_modes")
"""Real tensors inside a fake mode, unseen by other modes."""
peek_functorch = find("torch._C._functorch.peek_interpreter_stack")
"""Not None inside of torch.func transforms."""
is_traceable_wrapper_subclass = find("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
"""Whether a tensor subclass consists of other tensors."""
OpOverload = find("torch._ops.OpOverload")
tree_leaves = find("torch.utils._pytree.tree_leaves")
TensorBase = find("torch._C.TensorBase")
"""Has the setter of `requires_grad`."""

# torch: tensors without values.
detect_fake_mode = find("torch._guards.detect_fake_mode")
"""Whether the model is traced on fake tensors."""
make_wrapper_subclass = find("torch.Tensor._make_wrapper_subclass")
"""Logits that are never materialized (chunked loss)."""
parse_to = find("torch._C._nn._parse_to")
"""The dtype and device among the arguments of `Tensor.to`."""

# torch: operators without a public name.
neg_view = find("torch._neg_view")
unsafe_view = find("torch.ops.aten._unsafe_view")
"""Another shape for a new tensor, which autograd does not take for a view."""


def storage_id(storage: Any) -> int:
    """Identifies a storage as long as it lives. Two views of one tensor have the same."""
    return int(storage._cdata)


def node_number(node: Any) -> int:
    """The number that autograd gave a node when it was made."""
    return int(node._sequence_nr())


@cache
def cuda() -> SimpleNamespace:
    """Names that exist in CUDA builds alone."""
    return SimpleNamespace(
        sleep=find("torch.cuda._sleep"),  # lets the CPU run ahead of the GPU while a block is timed
        set_allocator_settings=find("torch._C._accelerator_setAllocatorSettings"),  # expandable segments
    )


@cache
def transformers() -> SimpleNamespace:
    """Weights are renamed and converted between a checkpoint's files and the model; models are built without
    initializing weights.
    """
    return SimpleNamespace(
        get_model_conversion_mapping=find("transformers.conversion_mapping.get_model_conversion_mapping"),
        WeightConverter=find("transformers.core_model_loading.WeightConverter"),
        WeightRenaming=find("transformers.core_model_loading.WeightRenaming"),
        rename_source_key=find("transformers.core_model_loading.rename_source_key"),
        revert_weight_conversion=find("transformers.core_model_loading.revert_weight_conversion"),
        remove_tied_weights=find("transformers.modeling_utils.remove_tied_weights_from_state_dict"),
        no_init_weights=find("transformers.initialization.no_init_weights"),
        ForCausalLMLoss=find("transformers.loss.loss_utils.ForCausalLMLoss"),  # the loss that may be computed in chunks
        render_jinja_template=find("transformers.utils.chat_template_utils.render_jinja_template"),
        from_config=find("transformers.PreTrainedModel._from_config"),
        # which modules its quantizers leave out
        get_keys_to_not_convert=find("transformers.quantizers.base.get_keys_to_not_convert"),
        should_convert_module=find("transformers.quantizers.quantizers_utils.should_convert_module"),
    )


TRAINER_METHODS = (
    "_clip_grad_norm", "_finalize_training", "_get_dataloader", "_get_grad_norm", "_get_num_items_in_batch",
    "_get_output_dir", "_init_training_state", "_load_best_model", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_load_rng_state", "_move_model_to_device", "_prepare_for_training",
    "_prepare_inputs", "_push_from_checkpoint", "_save", "_save_checkpoint",
)  # fmt: skip
"""Private methods of transformers.Trainer that integrations/ and run/ override or call."""


def check_libraries() -> None:
    """Look up all names of the other libraries, for `outsize doctor` and tests."""
    transformers()
    find("accelerate.state.GradientState._set_sync_gradients")
    for name in TRAINER_METHODS:
        find(f"transformers.Trainer.{name}")
