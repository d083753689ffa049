"""Explains why packages that outsize needs cannot be imported."""

from importlib.metadata import version

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def import_problem(error: BaseException) -> str:
    """What is wrong and what to do; empty if the error is of another kind. transformers imports its parts late, and
    hides the reason of a failure behind errors of its own.
    """
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    is_late = isinstance(error, ModuleNotFoundError) and root is not error
    if "torchvision" in str(root) and (is_late or root is error):
        return (
            f"torchvision cannot be imported ({root}): it was built for another torch than {version('torch')}. Install "
            f"both from one index (without an NVIDIA GPU: pip install torch torchvision --index-url {CPU_INDEX}), or "
            "remove it: pip uninstall torchvision."
        )
    if is_late:
        return (
            f"transformers cannot be imported ({type(root).__name__}: {root}). Repair or remove the package it names."
        )
    return ""
