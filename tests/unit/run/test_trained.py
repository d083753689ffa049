"""Which parameters a run trains: patterns, encoders of images, and adapters by regex or from a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from outsize.base.errors import ConfigError
from outsize.config.read import parse_config
from outsize.config.run import RunConfig
from outsize.model.build import Built
from outsize.run.adapters import adapt
from outsize.run.trained import freeze


def config_of(**keys: Any) -> RunConfig:
    return parse_config({"base_model": "m", "datasets": ["d"], **keys}, "here")


def trained(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


def test_parameters_that_match_no_pattern_are_frozen() -> None:
    model = zoo.make("llama-untied")
    freeze(model, config_of(unfrozen_parameters=["lm_head.*", "^model.layers.1.mlp", "no.such"]))
    parts = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert trained(model) == {"lm_head.weight", *parts}


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("no.such", "no parameter matches no.such"), ("lm_head.weight$[:8]", "names rows"), ("(", "is no regex")],
)
def test_a_pattern_that_trains_nothing_is_refused(pattern: str, part: str) -> None:
    with pytest.raises(ConfigError, match=r"^unfrozen_parameters: ") as caught:
        freeze(zoo.make("one-block"), config_of(unfrozen_parameters=pattern))
    assert part in str(caught.value)


def test_encoders_of_images_are_frozen() -> None:
    model = zoo.make("llava")
    freeze(model, config_of(freeze_mm_modules=True))
    frozen = {name for name, _ in model.named_parameters()} - trained(model)
    assert frozen and all("vision_tower" in name or "multi_modal_projector" in name for name in frozen)
    assert trained(model)


def test_a_target_that_the_model_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("peft")
    keys = config_of(adapter="lora", lora_target_modules=["q_proj", "mlp.up_proj", "k_porj"])
    assert trained(adapt(Built(zoo.make("llama"), None), keys).model)
    assert [record.getMessage() for record in caplog.records] == [
        "lora_target_modules: the model has no module k_porj; only the others get adapters"
    ]


def test_adapters_are_made_by_regex_and_continued_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    regex = r"model.layers.[\d]+.self_attn.(q|v)_proj"
    made = adapt(Built(zoo.make("llama"), None), config_of(adapter="lora", lora_target_modules=regex)).model
    names = trained(made)
    assert names and all("q_proj" in name or "v_proj" in name for name in names)
    for param in made.parameters():
        param.data += 0.5 * param.requires_grad
    made.save_pretrained(tmp_path)  # type: ignore[operator]
    keys = dict(adapter="lora", lora_target_linear=True, lora_model_dir=str(tmp_path))
    again = adapt(Built(zoo.make("llama"), None), config_of(**keys)).model
    assert trained(again) == names
    values = dict(made.named_parameters())
    assert all(torch.equal(param, values[name]) for name, param in again.named_parameters() if name in names)
    with pytest.raises(ConfigError, match=r"^lora_model_dir: .*/none has no adapter"):
        adapt(Built(zoo.make("llama"), None), config_of(**{**keys, "lora_model_dir": str(tmp_path / "none")}))
