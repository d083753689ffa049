"""Which parameters of a model are trained."""

import re

from torch import nn

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.config.run import RunConfig

_ENCODERS = {
    "vision_tower", "vision_model", "vision_encoder", "embed_vision", "multi_modal_projector", "visual", "audio_tower",
    "audio_model", "embed_audio",
}  # fmt: skip
"""Modules between or inside which vision-language models encode images and audio."""


def freeze(model: nn.Module, config: RunConfig) -> None:
    """Freeze what `unfrozen_parameters` and `freeze_mm_modules` exclude."""
    patterns = [(text, _pattern(text)) for text in config.unfrozen_parameters]
    names = [name for name, _ in model.named_parameters()]
    idle = [text for text, pattern in patterns if not any(pattern.match(name) for name in names)]
    if patterns and len(idle) == len(patterns):
        raise ConfigError(
            f"unfrozen_parameters: no parameter matches {', '.join(idle)}. Correct it; a name is such as {names[0]}."
        )
    if idle:
        log.warning("unfrozen_parameters: no parameter matches %s", ", ".join(idle))
    for name, param in model.named_parameters():
        is_left_out = patterns and not any(pattern.match(name) for _, pattern in patterns)
        if is_left_out or (config.freeze_mm_modules and not _ENCODERS.isdisjoint(name.split("."))):
            param.requires_grad_(False)


def _pattern(text: str) -> re.Pattern[str]:
    """As in Axolotl: a regex of the beginning of a name, in which a dot is a dot."""
    if re.search(r"\[\d*:\d*\]$", text):
        raise ConfigError(
            f"unfrozen_parameters: {text} names rows of a parameter, which are trained whole. Remove the range."
        )
    try:
        return re.compile(re.sub(r"\.(?!\+)", r"\\.", text))
    except re.error as error:
        raise ConfigError(f"unfrozen_parameters: {text} is no regex ({error}). Correct it.") from None
