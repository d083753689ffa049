"""Rows with images have the tokens that the processor makes, and labels on the answers alone, written down by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_folders
from vision_folders import LETTERS, SPECIAL, picture, processor_of

from outsize.base.errors import ConfigError, DataError
from outsize.config.run import DatasetConfig
from outsize.data.build import load_rows
from outsize.data.rows import IGNORED, Rows
from outsize.data.vision import Vision, VisionCollator

IDS = {token: n for n, token in enumerate([*SPECIAL, *LETTERS, "<|image|>"])}
SIZES = [(16, 16), (32, 16), (40, 24)]
TURNS = [
    {"role": "user", "content": "<image>\nWhat?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "<image>\nAnd <image>"},
    {"role": "assistant", "content": "Dogs."},
]
TILES = {
    "1": "<fake_token_around_image><global-img>¤¤¤¤<fake_token_around_image>",
    "2": "<fake_token_around_image><row_1_col_1>¤¤¤¤<fake_token_around_image><row_1_col_2>¤¤¤¤\n"
    "\n<fake_token_around_image><global-img>¤¤¤¤<fake_token_around_image>",
    "4": "<fake_token_around_image><row_1_col_1>¤¤¤¤<fake_token_around_image><row_1_col_2>¤¤¤¤\n"
    "<fake_token_around_image><row_2_col_1>¤¤¤¤<fake_token_around_image><row_2_col_2>¤¤¤¤\n"
    "\n<fake_token_around_image><global-img>¤¤¤¤<fake_token_around_image>",
}
GEMMA = "\n\n<start_of_image>¤¤¤¤<end_of_image>\n\n"
EXPECTED = {
    # Images first, then a newline each; 16 tokens an image, whatever its size.
    "llava": "USER: " + "¤" * 16 + "\nWhat? ASSISTANT: ⟦A cat. ⟧USER: " + ("¤" * 16 + "\n") * 2 + "And  ASSISTANT: ⟦Dogs. ⟧",
    # A token for 8 × 8 pixels: 2 × 2, 4 × 2 and 5 × 3 of them.
    "qwen": "<|im_start|>user\n<|vision_start|>" + "¤" * 4 + "<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    "⟦A cat.<|im_end|>\n⟧<|im_start|>user\n<|vision_start|>" + "¤" * 8 + "<|vision_end|>And <|vision_start|>" + "¤" * 15
    + "<|vision_end|><|im_end|>\n<|im_start|>assistant\n⟦Dogs.<|im_end|>\n⟧",
    "idefics3": f"<|im_start|>user\n{TILES['4']}What?<|im_end|>\n<|im_start|>assistant\n⟦A cat.<|im_end|>\n⟧"
    f"<|im_start|>user\n{TILES['2']}And {TILES['4']}<|im_end|>\n<|im_start|>assistant\n⟦Dogs.<|im_end|>\n⟧",
    "gemma3": f"<s><|im_start|>user\n{GEMMA}What?<|im_end|>\n<|im_start|>assistant\n⟦A cat.<|im_end|>\n⟧"
    f"<|im_start|>user\n{GEMMA}And {GEMMA}<|im_end|>\n<|im_start|>assistant\n⟦Dogs.<|im_end|>\n⟧",
    "mllama": "<s><|im_start|>user\n¤What?<|im_end|>\n<|im_start|>assistant\n⟦A cat.<|im_end|>\n⟧"
    "<|im_start|>user\n¤And ¤<|im_end|>\n<|im_start|>assistant\n⟦Dogs.<|im_end|>\n⟧",
}  # fmt: skip
"""`¤`: an image token. The loss is between ⟦ and ⟧."""
TOKEN = {"llava": "<image>", "qwen": "<|image_pad|>", "idefics3": "<image>", "gemma3": "<image>", "mllama": "<|image|>"}


def written(kind: str, text: str) -> tuple[list[int], list[int]]:
    """Tokens and labels of a text in which every letter is a token."""
    ids, labels, is_trained = [], [], False
    for piece in re.findall("|".join(map(re.escape, [*SPECIAL, "⟦", "⟧"])) + r"|.|\n", text):
        if piece in "⟦⟧":
            is_trained = piece == "⟦"
            continue
        letter = {" ": "Ġ", "\n": "Ċ", "¤": TOKEN[kind]}.get(piece, piece)
        ids.append(IDS[letter])
        labels.append(IDS[letter] if is_trained else IGNORED)
    return ids, labels


def save_pictures(folder: Path) -> list[str]:
    for n, size in enumerate(SIZES):
        picture(*size, seed=n).save(folder / f"{n}.png")
    return [f"{n}.png" for n in range(len(SIZES))]


def rows_of(folder: Path, vision: Vision, *records: dict[str, Any], **settings: Any) -> Rows:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = vision.processor.tokenizer
    tokenizer.chat_template = vision.processor.chat_template
    made, _ = load_rows(
        tokenizer, [DatasetConfig(path=str(path))], **{"sequence_len": 512, "pad_id": 1, "vision": vision, **settings}
    )
    assert isinstance(made, Rows)
    return made


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_loss_is_on_the_answers_token_by_token(tmp_path: Path, kind: str) -> None:
    vision = Vision(processor=processor_of(kind))
    (row,) = rows_of(tmp_path, vision, {"messages": TURNS, "images": save_pictures(tmp_path)})
    ids, labels = written(kind, EXPECTED[kind])
    assert row["input_ids"].tolist() == ids
    assert row["labels"].tolist() == labels


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(
            {
                "image": "1.png",
                "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
            },
            id="llava-json",
        ),
        pytest.param(
            {"prompt": [{"role": "user", "content": "What?"}], "completion": [TURNS[1]], "images": ["1.png"]}, id="trl"
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"index": 0, "type": "image"}, {"type": "text", "text": "What?"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
                ],
                "images": [{"path": "1.png"}],
            },
            id="vsft",
        ),
    ],
)
def test_a_question_about_an_image_has_the_same_document_in_each_form(tmp_path: Path, record: dict[str, Any]) -> None:
    save_pictures(tmp_path)
    (row,) = rows_of(tmp_path, Vision(processor=processor_of("qwen")), record)
    shown = "<|im_start|>user\n<|vision_start|>" + "¤" * 8 + "<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    ids, labels = written("qwen", shown + "⟦A cat.<|im_end|>\n⟧")
    assert row["input_ids"].tolist() == ids and row["labels"].tolist() == labels


@pytest.mark.parametrize("kind", EXPECTED)
def test_with_train_on_inputs_the_loss_is_on_all_but_the_images(tmp_path: Path, kind: str) -> None:
    vision = Vision(processor=processor_of(kind))
    (row,) = rows_of(tmp_path, vision, {"messages": TURNS, "images": save_pictures(tmp_path)}, train_on_inputs=True)
    images = {
        "llava": "¤+",
        "qwen": "¤+",
        "idefics3": "|".join(map(re.escape, reversed(TILES.values()))),
        "gemma3": GEMMA,
        "mllama": "¤",
    }
    bare = re.sub("[⟦⟧]", "", EXPECTED[kind])
    _, labels = written(kind, "⟦" + re.sub(images[kind], r"⟧\g<0>⟦", bare) + "⟧")
    assert row["labels"].tolist()[1:] == labels[1:]


@pytest.mark.parametrize("kind", [kind for kind in EXPECTED if kind != "mllama"])
def test_a_batch_is_the_processors_with_rows_of_0_1_and_3_images(tmp_path: Path, kind: str) -> None:
    processor = processor_of(kind)
    vision = Vision(processor=processor)
    names = save_pictures(tmp_path)
    rows = rows_of(
        tmp_path,
        vision,
        {"messages": TURNS, "images": names},
        {"messages": [{"role": "user", "content": "Hi"}, TURNS[1]]},
        {"messages": [{"role": "user", "content": [{"type": "image", "path": names[1]}]}, TURNS[1]]},
    )
    batch = VisionCollator(vision)([rows[i] for i in range(3)])
    pictures = [picture(*size, seed=n) for n, size in enumerate(SIZES)]
    expected = processor(
        text=[media.text for media in rows.media],
        images=[pictures, [], [pictures[1]]],
        padding=True,
        padding_side="right",
        return_tensors="pt",
        add_special_tokens=kind != "gemma3",  # its template has them
    )
    labels = batch.pop("labels")
    assert batch.keys() == expected.keys() and {"pixel_values", "attention_mask"} <= batch.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    for index, length in enumerate(rows.lengths):
        assert labels[index].tolist() == [*rows[index]["labels"], *[IGNORED] * (labels.shape[1] - length)]
    alone = VisionCollator(vision, pad_to=80)([rows[1]])
    assert "pixel_values" not in alone and alone["input_ids"].shape == alone["labels"].shape == (1, 80)
    assert int(alone["attention_mask"].sum()) == rows.lengths[1]


def test_rows_that_a_processor_cannot_batch_are_named(tmp_path: Path) -> None:
    vision = Vision(processor=processor_of("mllama"))
    names = save_pictures(tmp_path)
    given = {"messages": TURNS, "images": names}, {"messages": [{"role": "user", "content": "Hi"}, TURNS[1]]}
    rows = rows_of(tmp_path, vision, *given)
    collate = VisionCollator(vision)
    assert collate([rows[0]])["cross_attention_mask"].shape[:2] == (1, rows.lengths[0])
    with pytest.raises(
        DataError, match=r"data.jsonl:1, .*data.jsonl:2: MllamaProcessor cannot make a batch .*at least one"
    ):
        collate([rows[0], rows[1]])


def test_a_row_is_as_long_as_its_images_make_it_and_is_dropped_or_refused_but_never_cut(tmp_path: Path) -> None:
    vision = Vision(processor=processor_of("llava"))
    names = save_pictures(tmp_path)
    short = {"messages": [{"role": "user", "content": "Hi"}, TURNS[1]]}
    long = {"messages": TURNS, "images": names}
    kept = rows_of(tmp_path, vision, short, long, sequence_len=64, excess_length_strategy="drop")
    assert len(kept) == 1
    with pytest.raises(DataError, match=r"rows with images are not cut .*excess_length_strategy: drop"):
        rows_of(tmp_path, vision, short, long, sequence_len=64)


def test_images_are_resized_as_the_settings_say(tmp_path: Path) -> None:
    names = save_pictures(tmp_path)
    row = {"messages": [{"role": "user", "content": "<image>"}, TURNS[1]], "images": names[1:2]}
    for size, tokens in (((24, 16), 6), ((24,), 9)):
        vision = Vision(processor=processor_of("qwen"), image_size=size)
        rows = rows_of(tmp_path, vision, row)
        batch = VisionCollator(vision)([rows[0]])
        assert (batch["input_ids"] == IDS["<|image_pad|>"]).sum() == tokens
    assert (vision._load(str(tmp_path / names[1]), "here").getpixel((0, 0))) == (0, 0, 0)  # padded above and below


def test_equal_texts_about_different_images_are_not_duplicates(tmp_path: Path) -> None:
    vision = Vision(processor=processor_of("llava"))
    rows = [
        {"messages": [{"role": "user", "content": "<image>"}, TURNS[1]], "images": [name]}
        for name in (*save_pictures(tmp_path), "0.png")
    ]
    assert len(rows_of(tmp_path, vision, *rows, deduplicate=True)) == 3


def test_the_fingerprint_changes_with_an_images_content_but_not_with_its_place(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        found: list[str] = []
        vision = Vision(processor=processor_of("llava"))
        rows_of(folder, vision, {"messages": TURNS, "images": save_pictures(folder)}, fingerprints=found)
        return found[0]

    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    before = fingerprint(one)
    assert fingerprint(other) == before
    picture(*SIZES[0], seed=50).save(one / "x.png")
    found: list[str] = []
    vision = Vision(processor=processor_of("llava"))
    rows_of(one, vision, {"messages": TURNS, "images": ["x.png", "1.png", "2.png"]}, fingerprints=found)
    assert found[0] != before


def test_a_template_that_leaves_an_image_out_is_refused(tmp_path: Path) -> None:
    vision = Vision(processor=processor_of("llava"))
    vision.processor.chat_template = vision_folders.CHATML.replace("IMAGE", "")
    with pytest.raises(
        DataError, match=r"data.jsonl:1: the chat template renders 0 image tokens \(<image>\) for 1 images"
    ):
        rows_of(tmp_path, vision, {"messages": TURNS[:2], "images": save_pictures(tmp_path)[:1]})


def test_a_dataset_without_messages_beside_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of a type that has no messages"):
        rows_of(tmp_path, Vision(processor=processor_of("llava")), {"text": "Hi"})


def test_images_for_a_model_that_takes_none_are_refused(tmp_path: Path) -> None:
    tokenizer = processor_of("qwen").tokenizer
    tokenizer.chat_template = vision_folders.QWEN
    path = tmp_path / "data.jsonl"
    for row in (
        {"messages": TURNS, "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=r"data.jsonl:1: the row has images, but the model takes none"):
            load_rows(tokenizer, [DatasetConfig(path=str(path))], sequence_len=64, pad_id=1)


def test_other_tokens_than_a_blank_image_has_are_refused_at_the_batch(tmp_path: Path) -> None:
    vision = Vision(processor=processor_of("qwen"))
    names = save_pictures(tmp_path)
    rows = rows_of(tmp_path, vision, {"messages": TURNS, "images": names})
    picture(64, 64).save(tmp_path / names[0])
    with pytest.raises(DataError, match=r"data.jsonl:1: QwenImages makes other tokens than expected"):
        VisionCollator(vision)([rows[0]])


def test_a_processor_that_reports_no_replacements_is_refused(tmp_path: Path) -> None:
    class Silent:
        image_token = "<image>"

        def __init__(self) -> None:
            self.inner = processor_of("llava")
            self.tokenizer, self.chat_template = self.inner.tokenizer, self.inner.chat_template

        def __call__(self, **given: Any) -> dict[str, Any]:
            made = dict(self.inner(**given))
            made.pop("text_replacement_offsets", None)
            return made

    with pytest.raises(ConfigError, match=r"processor_type: Silent does not report what it replaces image tokens by"):
        rows_of(tmp_path, Vision(processor=Silent()), {"messages": TURNS, "images": save_pictures(tmp_path)})
