"""`outsize chat`: what it answers equals plain generation, and which folders it refuses."""

import shutil
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from typer.testing import CliRunner

from outsize.base.errors import BadFile, ConfigError, OutsizeError
from outsize.cli.main import app
from outsize.run.chat import Chat, ChatRequest
from outsize.run.export import export_folder
from outsize.run.prompt_format import read_prompts, write_prompts

CHATML = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|system|>' }}{% endfor %}{{ 'assistant: ' }}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and an adapter of it without one."""
    folder = tmp_path_factory.mktemp("made")
    model = folders.write_model(folder / "model", "llama-untied", torch.float32)
    folders.write_tokenizer(folder / "model")
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))  # type: ignore[arg-type]
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "model")
    adapted.save_pretrained(str(folder / "adapter"))
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def plain(folder: Path, *messages: str, adapter: Path | None = None, tokens: int = 8) -> str:
    """The answer of plain transformers to alternating messages of user and assistant."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(messages)]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def chat_of(folder: Path, **settings: Any) -> Chat:
    return Chat(ChatRequest(folder=folder, **{"max_new_tokens": 8, "temperature": 0.0, "device": "cpu", **settings}))


def test_answers_are_those_of_plain_generation_turn_by_turn(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of(made / "model")
    first = chat.answer("the cat")
    assert first == plain(made / "model", "the cat") and first in capsys.readouterr().out
    assert chat.answer("a dog") == plain(made / "model", "the cat", first, "a dog")
    chat.restart()
    assert chat.answer("a dog") == plain(made / "model", "a dog") != plain(made / "model", "the cat", first, "a dog")
    assert chat.is_cut


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_weights_that_do_not_fit_the_gpu_are_streamed(made: Path, name: str) -> None:
    chat = chat_of(made / name, device="sim:4MiB", gpu_memory="330KiB")
    assert "on a simulated 4MiB; " in chat.summary and "are streamed for every token" in chat.summary
    adapter = made / "adapter" if name == "adapter" else None
    assert chat.answer("the cat") == plain(made / "model", "the cat", adapter=adapter)


def test_an_answer_that_is_stopped_is_part_of_the_conversation(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(made / "model")
    whole = chat.answer("the cat")
    chat.restart()
    monkeypatch.setattr(TextStreamer, "put", lambda self, value: None if chat._is_stopped else chat.stop())
    part = chat.answer("the cat")
    assert part and len(part) < len(whole) and whole.startswith(part) and not chat.is_cut
    monkeypatch.undo()
    assert chat.answer("a dog") == plain(made / "model", "the cat", part, "a dog")


def test_old_turns_are_dropped_and_long_prompts_refused(made: Path) -> None:
    chat = chat_of(made / "model", max_new_tokens=20)
    for _ in range(3):  # of 128 positions
        answer = chat.answer("the cat sat on a mat and saw")
    assert answer
    with pytest.raises(ConfigError, match=r"^prompt: \d+ tokens, of at most 127\. "):
        chat.answer("far away from home " * 9)


def test_an_answer_ends_where_the_template_ends_turns(source: Path) -> None:
    """The generation config of a base model lacks the token."""
    (source / "model" / "chat_template.jinja").write_text(CHATML)
    ends = chat_of(source / "model")._generation.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(source / "model")
    assert {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|system|>")} <= set(ends)


def test_a_model_with_images_chats_with_text_under_a_template_that_shows_parts(tmp_path: Path) -> None:
    folders.write_model(tmp_path, "llava", torch.float32)
    folders.write_tokenizer(tmp_path)
    expected = chat_of(tmp_path).answer("the cat")
    assert expected
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("m['content']", "m['content'][0]['text']"))
    assert chat_of(tmp_path).answer("the cat") == expected


def test_the_command_prints_answers_to_stdout_and_the_rest_to_stderr(source: Path) -> None:
    (source / "model" / "chat_template.jinja").unlink()
    args = ["chat", str(source / "model"), "--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]
    once = CliRunner().invoke(app, [*args, "--prompt", "the cat"])
    assert once.exit_code == 0 and "No chat template: the model continues your text." in once.stderr
    talk = CliRunner().invoke(app, args, input="the cat\n/new\n\nthe cat\n/exit\nthe dog\n")
    assert talk.exit_code == 0 and talk.stdout == 2 * once.stdout
    empty = CliRunner().invoke(app, [*args, "--prompt", ""])
    assert empty.exit_code == 2 and "prompt: it is empty" in empty.stderr
    refused = CliRunner().invoke(app, [*args, "--system", "a"])
    assert refused.exit_code == 2 and "--system: the tokenizer has no chat template" in refused.stderr


ALPACA = "Do this.\n### Instruction:\n{instruction}\n### Response:\n"


@pytest.mark.parametrize(
    ("prompts", "raw", "text", "note"),
    [
        ([ALPACA], False, ALPACA.format(instruction="a cat {input}"), "in the format of the training data: 'Do this."),
        ([ALPACA], True, "a cat {input}", ""),
        (["{instruction}"], False, "a cat {input}", "the text as it is, without the chat template"),
        ([None], False, "<|user|>a cat {input}</s><|assistant|>", ""),
        (
            [None, ALPACA],
            False,
            "<|user|>a cat {input}</s><|assistant|>",
            "have 2 prompt formats; prompts use the first",
        ),
        ([""], False, "<|user|>a cat {input}</s><|assistant|>", "is not known"),
    ],
)
def test_prompts_are_written_as_in_the_training_data(
    source: Path, prompts: list[str | None], raw: bool, text: str, note: str
) -> None:
    write_prompts(source / "model", prompts)
    chat = chat_of(source / "model", raw=raw)
    chat.answer("a cat {input}")
    assert chat._prompts.tokens(chat._messages[:-2], "a cat {input}").tolist() == chat._prompts.encode(text).tolist()
    assert note in chat.note and bool(note) == bool(chat.note)
    assert bool(chat._messages) == text.startswith("<|user|>")


def test_an_exported_folder_keeps_the_format_of_prompts(source: Path, tmp_path: Path) -> None:
    write_prompts(source / "adapter", [ALPACA])
    export_folder(source / "adapter", tmp_path / "merged", merge=True)
    assert read_prompts(tmp_path / "merged") == [ALPACA]


def test_the_result_of_a_run_and_its_checkpoints_can_be_chatted_with(tmp_path: Path) -> None:
    run = folders.write_run(tmp_path, kind="one-block", chat=True, max_steps=1, adapter="lora", lora_r=2)
    run.write_text(yaml.safe_dump({**yaml.safe_load(run.read_text()), "lora_target_linear": True}))
    assert CliRunner().invoke(app, ["train", str(run)]).exit_code == 0
    result = chat_of(tmp_path / "out")
    answers = {result.answer("the cat"), chat_of(tmp_path / "out" / "checkpoint-1").answer("the cat")}
    for path in (tmp_path / "out").glob("adapter_*"):
        path.unlink()
    unfinished = chat_of(tmp_path / "out")  # without a result
    assert unfinished.folder == tmp_path / "out" / "checkpoint-1"
    assert len(answers | {unfinished.answer("the cat")}) == 1


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


def _remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _mark_unfinished(folder: Path) -> None:
    (folder / "outsize.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (shutil.rmtree, ConfigError, "there is no such folder"),
        (_remove_weights, BadFile, "its weights cannot be loaded"),
        (_remove_tokenizer, BadFile, "no tokenizer in the folder"),
        (_mark_unfinished, BadFile, "is not a complete checkpoint"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    source: Path, change: Any, error: type[OutsizeError], words: str
) -> None:
    change(source / "model")
    with pytest.raises(error, match=words):
        chat_of(source / "model")


def test_an_adapter_whose_base_is_gone_is_refused_and_may_name_another(source: Path, made: Path) -> None:
    config = source / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(made), "/no/where"))
    with pytest.raises(ConfigError, match=r"adapter: the adapter's base cannot be loaded \(/no/where.*--base"):
        chat_of(source / "adapter")
    assert chat_of(source / "adapter", base=str(made / "model")).answer("the cat")


def test_gpu_memory_on_the_cpu_is_refused(made: Path) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory: the model runs on the CPU"):
        chat_of(made / "model", gpu_memory="1GiB")
