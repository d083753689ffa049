"""The exceptions that outsize raises.

A message names the setting or object, says what is wrong with the value found, and says what to do. outsize never
recognises an error by its text.
"""

SEVERAL_FORWARDS = (
    "For a loss of several forwards, concatenate the batches into one forward; or cache the gradients of the outputs "
    "(GradCache); or, if the weights fit "
    "the GPU, make all forwards in the forward of one module and prepare that module (class Pair). docs/loops.md has "
    "an example of each."
)
"""What to do instead of several training forwards before one backward."""


class OutsizeError(Exception):
    """The root of all our errors."""


class ConfigError(OutsizeError, ValueError):
    """Something the user wrote (a size, an option, a name) is not usable as it stands."""


class DataError(OutsizeError, ValueError):
    """A dataset cannot be used as it stands."""


class PlanInfeasible(OutsizeError):
    """No plan fits the budgets. An answer, not a crash: it says what would do."""

    def __init__(self, message: str, *, resource: str, allowed_bytes: int, needed_bytes: int):
        super().__init__(message)
        self.resource = resource
        """`gpu` or `host`: the memory that is too small."""
        self.allowed_bytes = allowed_bytes
        self.needed_bytes = needed_bytes
        """The smallest budget for `resource` under which a plan exists, the other budget as given."""


class PlanInvalid(OutsizeError, ValueError):
    """A plan (usually a file) that does not belong to this model or contradicts itself."""


class ModelUnsupported(OutsizeError, TypeError):
    """A model that the engine cannot train, with the part of it that is the reason."""


class DeviceOutOfMemory(OutsizeError, MemoryError):
    """The device's budget was exceeded."""


class BadFile(OutsizeError, ValueError):
    """A file or folder of weights or state that is cut off, damaged, or belongs to something else."""


class SaveFailed(OutsizeError, OSError):
    """A save did not complete; what was saved before is as it was."""


class RaceDetected(OutsizeError):
    """Two accesses to one buffer without an order between them (device `sim` only). A bug of ours."""


class StaleParameter(OutsizeError, RuntimeError):
    """A parameter was read while its slot held other bytes."""


class OrderMismatch(OutsizeError, RuntimeError):
    """The model ran its blocks in another order than the plan's."""


class EngineMisuse(OutsizeError, RuntimeError):
    """Something done to a prepared model that would lose or corrupt weights."""


class NonFiniteGradient(OutsizeError, FloatingPointError):
    """A gradient with NaN or infinity, under the policy `raise`."""


class UpdateFailed(OutsizeError, RuntimeError):
    """An exception in a background update; surfaces at the next step, forward or save."""
