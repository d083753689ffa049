"""A run with images: its processor, what is refused before the model is built, and the batch that the plan is for."""

import io
import json
from pathlib import Path
from typing import Any

import folders
import pytest
import transformers
import vision_folders
import yaml as yaml_format
from rich.console import Console
from typer.testing import CliRunner

from outsize.base.errors import ConfigError, DataError
from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.run.assemble import assemble
from outsize.run.train import preview_run
from outsize.run.vision import load_vision


def run_file(folder: Path, rows: list[dict[str, Any]], kind: str = "llava", **keys: Any) -> Path:
    path = vision_folders.write_run(folder, kind, **keys)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(*images: str, text: str = "What?") -> dict[str, Any]:
    parts = [*({"type": "image", "path": image} for image in images), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]}


def test_the_processor_is_loaded_only_if_data_hold_images_and_the_model_takes_them(tmp_path: Path) -> None:
    text = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}]
    path = run_file(tmp_path, text, processor_type="AutoProcessor", sample_packing=True)
    assert load_vision(read_config(path)) is None
    (tmp_path / "eval.jsonl").write_text(json.dumps(asked("a.png")) + "\n")
    given = yaml_format.safe_load(path.read_text()) | {"test_datasets": [str(tmp_path / "eval.jsonl")]}
    settings = {"sample_packing": False, "image_size": 32, "processor_kwargs": {"image_mean": [0.0, 0.0, 0.0]}}
    path.write_text(yaml_format.safe_dump(given | settings))
    found = load_vision(read_config(path))
    assert found is not None and found.image_size == (32,) and type(found.processor).__name__ == "LlavaProcessor"
    assert list(found.processor.image_processor.image_mean) == [0.0, 0.0, 0.0]
    (tmp_path / "text").mkdir()
    assert load_vision(read_config(folders.write_run(tmp_path / "text"))) is None


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"sample_packing": True}, "sample_packing: rows with images are not packed"),
        ({"processor_type": "NoProcessor"}, "processor_type: transformers has no NoProcessor"),
    ],
)
def test_a_run_that_cannot_have_images_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_vision(read_config(vision_folders.write_run(tmp_path, **keys)))


def test_a_processor_that_needs_a_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library but it was not found.\nSee …")

    monkeypatch.setattr(transformers.LlavaProcessor, "from_pretrained", raises)
    found = r"is not installed \(Qwen2VLVideoProcessor requires .* not found\). Run: pip install 'outsize\[vision\]'"
    with pytest.raises(ConfigError, match=found):
        load_vision(read_config(vision_folders.write_run(tmp_path)))


def test_a_tokenizer_without_a_pad_token_is_refused(tmp_path: Path) -> None:
    path = vision_folders.write_run(tmp_path)
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": None}))
    with pytest.raises(ConfigError, match=r"the tokenizer has no pad token, which the processor of .* pads with"):
        assemble(read_config(path))


def test_a_damaged_image_ends_the_run_with_its_name_at_its_batch(tmp_path: Path) -> None:
    path = vision_folders.write_run(tmp_path)
    image = tmp_path / "1-0.png"
    image.write_bytes(image.read_bytes()[:400])
    done = CliRunner().invoke(app, ["train", str(path), "--set", "train_sampling_strategy=sequential"])
    assert done.exit_code == 2 and "data.jsonl:2: the image" in done.output and "1-0.png cannot be read" in done.output


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    path = vision_folders.write_run(tmp_path)
    (tmp_path / "model" / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"model has no (usable )?processor"):
        load_vision(read_config(path))


def test_a_missing_image_is_found_before_the_model_is_built(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:2: there is no image .*away.png"):
        assemble(read_config(run_file(tmp_path, [asked("1-0.png"), asked("away.png")], reinit_weights=True)))


def test_the_keys_of_an_axolotl_file_for_images_are_accepted(tmp_path: Path) -> None:
    path = vision_folders.write_run(
        tmp_path,
        processor_type="AutoProcessor",
        skip_prepare_dataset=True,
        remove_unused_columns=False,
        sample_packing=False,
        chat_template="llava",
        image_size=[24, 16],
        image_resize_algorithm="bicubic",
        adapter="lora",
        lora_target_modules=r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
        flash_attention=None,
        eager_attention=None,
    )
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0 and "frozen" in done.output, done.output


@pytest.mark.parametrize("kind", ["llava", "qwen"])
def test_the_plan_is_for_the_rows_with_most_images_and_the_longest_row(tmp_path: Path, kind: str) -> None:
    for n, size in enumerate([(16, 16), (32, 32), (24, 24), (48, 40)]):
        vision_folders.picture(*size).save(tmp_path / f"p{n}.png")
    rows = [asked("p0.png"), asked("p1.png", "p2.png"), asked(text="x" * 90), asked("p3.png", "p0.png"), asked()]
    path = run_file(tmp_path, rows, kind)
    planned = preview_run(read_config(path), Console(file=io.StringIO()))
    inputs = planned.plan.inputs
    longest = assemble(read_config(path)).longest_row
    assert inputs["input_ids"] == (2, longest) and longest > 90
    if kind == "llava":
        assert inputs["pixel_values"] == (4, 3, 16, 16)
    else:
        patches = (48 * 40 + 16 * 16 + 32 * 32 + 24 * 24) // 16
        assert inputs["pixel_values"][0] == patches and inputs["image_grid_thw"] == (4, 3)


def test_the_micro_batch_is_chosen_for_rows_with_images_and_the_run_does_not_plan_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = vision_folders.write_run(
        tmp_path,
        micro_batch_size=None,
        gradient_accumulation_steps=None,
        batch_size=4,
        gpu_memory="3MiB",
        device="sim:3MiB",
    )
    with caplog.at_level("INFO", "outsize"):
        done = CliRunner().invoke(app, ["train", str(path)])
    assert done.exit_code == 0, done.output
    assert "micro-batches" in caplog.text and "planning again" not in caplog.text


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen", marks=pytest.mark.full)])
def test_outsize_plan_answers_for_a_run_with_images(tmp_path: Path, kind: str) -> None:
    path = vision_folders.write_run(tmp_path, kind)
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code == 0, done.output
    assert "pixel_values" in done.output and "longest row of the data" in done.output
    assert "sample_packing fills them" not in done.output


def test_a_hub_dataset_with_an_image_column_is_read_without_decoding(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = [[vision_folders.picture(16, 16, seed=n)] for n in range(3)]
    chats = [
        [
            {"role": "user", "content": [{"index": None, "text": "What?", "type": "text"}, {"index": 0, "text": None, "type": "image"}]},
            {"role": "assistant", "content": [{"index": None, "text": f"Cat {n}.", "type": "text"}]},
        ]
        for n in range(3)
    ]  # fmt: skip
    made = datasets.Dataset.from_dict({"messages": chats, "images": images})
    made = made.cast_column("images", datasets.List(datasets.Image()))
    made.save_to_disk(str(tmp_path / "saved"))
    path = vision_folders.write_run(tmp_path, datasets=[str(tmp_path / "saved")], max_steps=1)
    assembled = assemble(read_config(path))
    assert assembled.num_rows == 3
    row = assembled.trainer.train_dataset[1]
    batch = assembled.trainer.data_collator([row])
    assert batch["pixel_values"].shape == (1, 3, 16, 16) and row["media"].images[0].startswith("/")
