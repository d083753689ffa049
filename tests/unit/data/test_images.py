"""The images of rows become files, whichever way the data have them."""

import base64
import io
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import vision_folders
from PIL import Image

from outsize.base.errors import DataError
from outsize.data.files import Record
from outsize.data.images import has_images, image_file, image_parts, load_image

IMAGE = {"type": "image"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def parts_of(messages: list[dict[str, Any]], **columns: Any) -> tuple[list[Any], list[Any]]:
    made, found = image_parts(Record(fields={"messages": messages, **columns}, place="data.jsonl:7"), messages)
    return [message["content"] for message in made], found


@pytest.mark.parametrize(
    ("content", "columns", "parts", "images"),
    [
        pytest.param("What?", {}, "What?", [], id="text"),
        pytest.param(
            [{"type": "image", "path": "a.png", "text": None}, text("What?")],
            {},
            [IMAGE, text("What?")],
            [{"type": "image", "path": "a.png"}],
            id="path",
        ),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "http://x/a"}}],
            {},
            [IMAGE],
            [{"type": "image_url", "image_url": {"url": "http://x/a"}}],
            id="openai",
        ),
        pytest.param(
            "<image>\n<image>First\n<image> last?",
            {"images": ["a", "b", "c"]},
            [IMAGE, IMAGE, text("First"), IMAGE, text(" last?")],
            ["a", "b", "c"],
            id="placeholders",
        ),
        pytest.param([text("See"), IMAGE], {"images": ["a"]}, [text("See"), IMAGE], ["a"], id="column"),
        pytest.param(
            [{**IMAGE, "index": 1}, {**IMAGE, "index": 0}],
            {"images": ["a", "b"]},
            [IMAGE, IMAGE],
            ["b", "a"],
            id="index",
        ),
        pytest.param("What?", {"images": ["a", "b"]}, [IMAGE, IMAGE, text("What?")], ["a", "b"], id="trl"),
        pytest.param("What?", {"image": "a"}, [IMAGE, text("What?")], ["a"], id="one"),
        pytest.param("What?", {"images": []}, "What?", [], id="none"),
    ],
)
def test_images_are_found_in_parts_placeholders_and_columns(
    content: Any, columns: Any, parts: Any, images: Any
) -> None:
    assert parts_of([user(content)], **columns) == ([parts], images)


def test_images_of_a_column_go_to_the_messages_in_order() -> None:
    messages = [user("<image>\nA?"), {"role": "assistant", "content": "One."}, user([IMAGE, text("B?")])]
    made, found = parts_of(messages, images=["a", "b"])
    assert made == [[IMAGE, text("A?")], "One.", [IMAGE, text("B?")]] and found == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "columns", "problem"),
    [
        ([IMAGE], {}, "a place for image 1, but the row has 0 images"),
        ("<image> <image>", {"images": ["a"]}, "a place for image 2, but the row has 1 images"),
        ("<image>", {"images": ["a", "b"]}, "2 images, but the messages have 1 places"),
        ([{**IMAGE, "index": 4}], {"images": ["a"]}, "a place for image 5"),
    ],
)
def test_images_without_a_place_and_places_without_an_image_are_refused(
    content: Any, columns: Any, problem: str
) -> None:
    with pytest.raises(DataError, match=rf"data.jsonl:7: .*{problem}"):
        parts_of([user(content)], **columns)


def test_rows_with_images_are_recognized() -> None:
    def found(**fields: Any) -> bool:
        return has_images(Record(fields=fields, place="-"))

    assert found(images=["a"]) and found(image="a") and found(talk=[user([IMAGE])])
    assert found(conversations=[{"from": "human", "value": [{"type": "image_url"}]}])
    assert not found(messages=[user("Hi <image>"), user([text("Hi")])], images=[], image=None)


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


PICTURE = vision_folders.picture(24, 16)
BYTES = encoded(PICTURE)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param("sub/a.png", id="path"),
        pytest.param({"path": "sub/a.png"}, id="object"),
        pytest.param({"type": "image", "image": {"bytes": BYTES, "path": "elsewhere.png"}}, id="bytes"),
        pytest.param({"base64": base64.b64encode(BYTES).decode()}, id="base64"),
        pytest.param("data:image/png;base64," + base64.b64encode(BYTES).decode(), id="uri"),
        pytest.param({"image_url": {"url": "data:image;base64," + base64.b64encode(BYTES).decode()}}, id="openai"),
        pytest.param(PICTURE, id="decoded"),
    ],
)
def test_an_image_becomes_a_file_with_the_same_pixels(tmp_path: Path, given: Any) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(BYTES)
    file = image_file(given, tmp_path, "here")
    assert file.size == (24, 16)
    assert load_image(file.path, "here").tobytes() == PICTURE.tobytes()


def test_an_absolute_path_and_a_file_url_need_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(BYTES)
    for given in (str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        assert image_file(given, Path("nowhere"), "here").path == str(tmp_path / "a.png")


def test_a_turned_photo_has_the_size_that_is_shown(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.jpg").write_bytes(encoded(PICTURE, "JPEG", exif=exif))
    file = image_file("a.jpg", tmp_path, "here")
    assert file.size == load_image(file.path, "here").size == (16, 24)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("none.png", "there is no image .*none.png"),
        ("text.png", "the image .*text.png cannot be read"),
        ({"base64": "a"}, "not valid base64"),
        (17, "an image is a number, not a path"),
        ({}, "an image is null"),
        (b"no image", "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused_with_its_row(tmp_path: Path, given: Any, problem: str) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=f"data.jsonl:3: .*{problem}"):
        image_file(given, tmp_path, "data.jsonl:3")


def test_a_file_that_is_cut_off_is_named_when_its_batch_is_made(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(vision_folders.picture(64, 64))[:2000])
    file = image_file("a.png", tmp_path, "data.jsonl:3")
    with pytest.raises(DataError, match=r"data.jsonl:3: the image .*a.png cannot be read"):
        load_image(file.path, "data.jsonl:3")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """An address that serves `tmp_path`, and the paths that were fetched."""
    fetched: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            fetched.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", fetched
        served.shutdown()
        thread.join()


def test_a_url_is_downloaded_once(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(BYTES)
    address, fetched = server
    for _ in range(2):
        file = image_file({"url": f"{address}/a.png"}, tmp_path, "here")
        assert Path(file.path).parent == tmp_path / "cache" / "images"
        assert load_image(file.path, "here").tobytes() == PICTURE.tobytes()
    assert fetched == ["/a.png"]
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    image_file(f"{address}/a.png", tmp_path, "here")
    assert fetched == ["/a.png"] * 2


def test_a_url_that_fails_is_named(server: tuple[str, list[str]], tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data.jsonl:3: http://127.0.0.1:\d+/none.png cannot be downloaded \(HTTP Error 404"
    ):
        image_file(f"{server[0]}/none.png", tmp_path, "data.jsonl:3")
    with pytest.raises(DataError, match=r"http://127.0.0.1:9/a.png cannot be downloaded"):
        image_file("http://127.0.0.1:9/a.png", tmp_path, "here")
