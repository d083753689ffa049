"""The tokenizer of a run: another source, tokens with a role, and chat templates by name."""

from pathlib import Path
from typing import Any

import folders
import pytest

from outsize.base.errors import ConfigError
from outsize.config.read import parse_config
from outsize.data.templates import TEMPLATES
from outsize.run.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    folders.write_tokenizer(folder)
    return str(folder)


def load(model: str, **keys: Any) -> Any:
    return load_tokenizer(parse_config({"base_model": model, "datasets": ["d"], **keys}, "here"))


def test_tokens_of_the_vocabulary_get_a_role(model: str) -> None:
    tokenizer = load("elsewhere", tokenizer_config=model, special_tokens={"pad_token": "</s>", "bos_token": "<|user|>"})
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("</s>", "<|user|>", "</s>")


def test_a_pad_token_outside_of_the_vocabulary_is_not_needed(model: str) -> None:
    tokenizer = load(model, special_tokens={"pad_token": "[PAD]"})
    assert tokenizer.pad_token == "<pad>" and "[PAD]" not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"special_tokens": {"eos_token": "<|im_end|>"}}, "special_tokens: the tokenizer's vocabulary lacks <|im_end|>."),
        ({"tokens": ["<pad>", "<a>", "<b>"]}, "tokens: the tokenizer's vocabulary lacks <a>, <b>."),
    ],
)  # fmt: skip
def test_a_token_without_an_embedding_is_refused(model: str, keys: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(model, **keys)
    assert str(caught.value).startswith(part) and "resize_token_embeddings" in str(caught.value)


def test_a_chat_template_has_a_name(model: str, tmp_path: Path) -> None:
    assert load(model, chat_template="chatml").chat_template == TEMPLATES["chatml"]
    assert load(model, chat_template="tokenizer_default_fallback_chatml").chat_template == folders.TEMPLATE
    assert load(model, chat_template="qwen_25").chat_template == folders.TEMPLATE  # the tokenizer's own
    assert load(model, chat_template="jinja", chat_template_jinja="{{ messages }}").chat_template == "{{ messages }}"
    bare = folders.write_tokenizer(tmp_path)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert load(str(tmp_path), chat_template="tokenizer_default_fallback_llama3").chat_template == TEMPLATES["llama3"]
    with pytest.raises(ConfigError, match=r"qwen_25 is not among .*chat_template_jinja"):
        load(str(tmp_path), chat_template="qwen_25")
