"""The exceptions that outsize raises.

A message names the setting or object, says what is wrong with the value found, and says what to do. outsize never
recognizes an error by its text.
"""

SEVERAL_FORWARDS = (
    "For a loss of several forwards, concatenate the batches into one forward; or cache the gradients of the outputs "
    "(GradCache); or, if the weights fit "
    "the GPU, make all forwards in the forward of one module and prepare that module (class Pair). docs/loops.md has "
    "an example of each."
)
"""The alternatives to several training forwards before one backward, for messages."""

READS_OUTSIDE_FORWARD = (
    "Compute that part of the loss inside the forward of the prepared model; for an L2 penalty use weight_decay; for "
    "logging use torch.no_grad()."
)
"""The alternatives to reading weights in a loss, for messages."""


class OutsizeError(Exception):
    """Base class of all outsize errors."""


class ConfigError(OutsizeError, ValueError):
    """A setting (a size, an option, a name) is invalid."""


class DataError(OutsizeError, ValueError):
    """A dataset is invalid."""


class PlanInfeasible(OutsizeError):
    """No plan fits the budgets. The message names the memory that is enough."""

    def __init__(self, message: str, *, resource: str, allowed_bytes: int, needed_bytes: int):
        super().__init__(message)
        self.resource = resource
        """`gpu` or `host`: the memory that is too small."""
        self.allowed_bytes = allowed_bytes
        self.needed_bytes = needed_bytes
        """The smallest budget for `resource` under which a plan exists, the other budget as given."""


class PlanInvalid(OutsizeError, ValueError):
    """A plan (usually a file) is for another model or inconsistent."""


class ModelUnsupported(OutsizeError, TypeError):
    """The engine cannot train the model. The message names the part that is the reason."""


class DeviceOutOfMemory(OutsizeError, MemoryError):
    """The device's budget was exceeded."""


class BadFile(OutsizeError, ValueError):
    """A file or folder of weights or state is truncated, damaged or for another model."""


class SaveFailed(OutsizeError, OSError):
    """A save did not complete; earlier checkpoints are unchanged."""


class TransferError(OutsizeError, RuntimeError):
    """Tensors cannot be sent to the host or brought back."""


class RaceDetected(OutsizeError):
    """Two accesses to one buffer are not ordered (device `sim` only). This is a bug in outsize."""


class StaleParameter(OutsizeError, RuntimeError):
    """A parameter was read while its slot held another chunk."""


class OrderMismatch(OutsizeError, RuntimeError):
    """The model ran its blocks in another order than the plan has."""


class EngineMisuse(OutsizeError, RuntimeError):
    """An operation on a prepared model that would lose or corrupt weights."""


class NonFiniteGradient(OutsizeError, FloatingPointError):
    """A gradient is NaN or infinite, with `nonfinite="raise"`."""


class UpdateFailed(OutsizeError, RuntimeError):
    """A background update failed. Raised at the next step, forward or save."""
