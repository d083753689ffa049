"""The processor of a run whose data have images."""

import inspect
from typing import Any

import transformers

from outsize.base.errors import ConfigError
from outsize.config.run import RunConfig
from outsize.data.files import need
from outsize.data.formats import may_have_images
from outsize.data.images import has_images
from outsize.data.sources import read
from outsize.data.vision import Vision
from outsize.model.build import load_config, trainable_class
from outsize.run.compat_checks import first_line


def takes_images(config: RunConfig) -> bool:
    kind = trainable_class(load_config(config.base_model, may_be_quantized=True))
    return "pixel_values" in inspect.signature(kind.forward).parameters


def load_vision(config: RunConfig) -> Vision | None:
    """None: the model takes no images, or the data have none."""
    if not takes_images(config):
        return None
    sources = [source for source in (*config.datasets, *config.test_datasets) if may_have_images(source)]
    if not any(has_images(record) for source in sources for record in read(source)):
        return None
    need("PIL.Image", to_read="images", extra="vision")
    if config.sample_packing:
        raise ConfigError("sample_packing: rows with images are not packed. Use sample_packing: false.")
    return Vision(
        processor=_load_processor(config), image_size=config.image_size, resample=config.image_resize_algorithm
    )


def _load_processor(config: RunConfig) -> Any:
    source = config.tokenizer_config or config.base_model
    kind = getattr(transformers, config.processor_type, None)
    if kind is None:
        raise ConfigError(
            f"processor_type: transformers has no {config.processor_type}. Remove the setting: AutoProcessor finds it."
        )
    try:
        processor = kind.from_pretrained(source, **(config.processor_kwargs or {}))
    except ImportError as error:
        raise ConfigError(
            f"base_model: the processor of {source} needs a package that is not installed ({first_line(error)}). Run: "
            "pip install 'outsize[vision]'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"base_model: {source} has no usable processor ({first_line(error)}). Save the model's own into the folder."
        ) from None
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"base_model: {source} has no processor for images, but the data have images. Save the model's own into "
            "the folder."
        )
    return processor
