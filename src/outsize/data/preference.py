"""Reads preference pairs: a prompt, and two answers of which one is preferred.

A pair becomes two documents, the chosen and the rejected answer, each after the prompt. The labels are those of the
answer's tokens. The tokens are those of TRL's DPOTrainer for the same pair. The formats that write a template into the
texts are Axolotl's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from outsize.base.errors import ConfigError, DataError
from outsize.base.log import log
from outsize.config.run import DatasetConfig
from outsize.data.chat import Chats, message_of
from outsize.data.files import Record, json_type
from outsize.data.formats import INSTRUCTION, UNKNOWN_PROMPT
from outsize.data.rows import IGNORED, Document, Excess, Ints, Rows, check_lengths, cut, split_off, trainable
from outsize.data.sources import read
from outsize.progress import counted

Pair = dict[str, Any]
"""`prompt`, `chosen` and `rejected`, all of them texts or all of them lists of messages."""
_RECORDS_AT_ONCE = 256
"""Tokenized in one call, which fast tokenizers spread over threads."""
_CORRECT = "Correct or remove the record."
_CONVERSATION = ("chat_template", "chat_template.default")
_STYLES = {
    "chatml": ("<|im_start|>ROLE\n", "<|im_end|>", "\n"),
    "llama3": ("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", ""),
}
"""The beginning of a turn, its end, and what stands between turns."""
_QUESTIONS = ("prompt", "input", "question", "instruction")
_BESIDE = (*_QUESTIONS, "messages", "conversation", "conversations")
"""Columns that may hold the prompt."""
_QUESTION_OF = {"icr": "input", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}


def pair_of(record: Record, source: DatasetConfig) -> Pair:
    """The pair of a record, in the form in which TRL's DPOTrainer takes it."""
    if images := [name for name in ("image", "images") if record.fields.get(name)]:
        raise DataError(f"{record.place}: rl: dpo takes text alone, but {images[0]!r} has images. Remove the dataset.")
    if source.prompt is not None:
        return _own_format(record, source.prompt)
    if source.type in _CONVERSATION:
        return _conversation(record, source)
    if source.type == "chat_template.argilla_chat":
        return _two_conversations(record, source)
    if source.type is not None:
        style, _, form = source.type.partition(".")
        return _styled(record, source, *_STYLES[style], form)
    return _columns(record, source)


# --- formats


def _columns(record: Record, source: DatasetConfig) -> Pair:
    """The columns prompt, chosen and rejected. Without a prompt, it is what both answers begin with."""
    names = {"prompt": "prompt", "chosen": source.field_chosen, "rejected": source.field_rejected}
    if not {source.field_chosen, source.field_rejected} & set(record.fields):
        raise DataError(
            f"{record.place}: rl: dpo needs pairs of answers, but there are no columns {source.field_chosen!r} and "
            f"{source.field_rejected!r}; the columns are {', '.join(record.fields) or 'none'}. Name them with "
            "`field_chosen` and `field_rejected`, or remove `rl` if the data has no pairs."
        )
    if record.fields.get("prompt") is None:
        del names["prompt"]
    pair = {name: _part(record, column, source) for name, column in names.items()}
    answers = [pair["chosen"], pair["rejected"]]
    is_whole = "prompt" in pair or not any(isinstance(answer, str) or len(answer) == 1 for answer in answers)
    if idle := [name for name in (*(() if is_whole else _BESIDE), "system") if record.fields.get(name)]:
        raise DataError(
            f"{record.place}: without `type`, the column {idle[0]!r} is not used. Set `type` of this dataset "
            "(docs/data.md lists those of pairs), or remove the column."
        )
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise DataError(f"{record.place}: one of chosen and rejected is text, the other one messages. {_CORRECT}")
    prompt = pair.get("prompt")
    if isinstance(prompt, str) and not isinstance(answers[0], str):
        asked = [{"role": "user", "content": prompt}]
        if not all(answer[:1] == asked for answer in answers):
            return {**pair, "prompt": asked}
        prompt = None  # UltraFeedback: each answer is a whole conversation
    elif prompt is not None and isinstance(prompt, str) != isinstance(answers[0], str):
        raise DataError(f"{record.place}: the prompt has messages, the answers are text. {_CORRECT}")
    return pair if prompt is not None else _split_prompt(*answers)


def _split_prompt(chosen: Any, rejected: Any) -> Pair:
    """As TRL does. An answer is never empty, and a space before it belongs to it."""
    shorter = min(len(chosen), len(rejected))
    end = next((i for i in range(shorter) if chosen[i] != rejected[i]), max(shorter - 1, 0))
    if end and isinstance(chosen, str) and chosen[end] != rejected[end] and chosen[end - 1] == " ":
        end -= 1
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _conversation(record: Record, source: DatasetConfig) -> Pair:
    """A column of messages, or of one question, and two answers; of a list, the last message is the answer."""
    asked = record.get(source.field_messages, key="field_messages")
    prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else _messages(record, asked, source)
    answers = {}
    for name, column in (("chosen", source.field_chosen), ("rejected", source.field_rejected)):
        part = _part(record, column, source)
        answers[name] = [{"role": "assistant", "content": part}] if isinstance(part, str) else part[-1:]
    return {"prompt": prompt, **answers}


def _two_conversations(record: Record, source: DatasetConfig) -> Pair:
    chosen, rejected = (
        _messages(record, record.get(column, key=key), source, column)
        for column, key in ((source.field_chosen, "field_chosen"), (source.field_rejected, "field_rejected"))
    )
    if chosen[:-1] != rejected[:-1]:
        raise DataError(f"{record.place}: the two conversations differ before their last message. {_CORRECT}")
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def _styled(record: Record, source: DatasetConfig, begin: str, end: str, between: str, form: str) -> Pair:
    """Texts with the marks of a template in them."""

    def turn(role: str, content: str) -> str:
        return f"{begin.replace('ROLE', role)}{content}{end}{between}"

    def answer(name: str, other: str) -> str:
        column = other if form == "default" and name not in record.fields else name
        value = record.get(column, key="type")
        if form not in ("ultra", "argilla_chat"):
            return record.get_text(column, key="type")
        return _two_turns(record, column, value, source)[1]

    if form == "argilla_chat":
        question, system = _two_turns(record, "chosen", record.get("chosen", key="type"), source)[0], None
    else:
        found = next((name for name in _QUESTIONS if name in record.fields), "prompt")
        question = record.get_text(_QUESTION_OF.get(form, found), key="type")
        system = record.fields.get("system")
    prompt = (turn("system", system) if system else "") + turn("user", question)
    return {
        "prompt": prompt + begin.replace("ROLE", "assistant"),
        "chosen": answer("chosen", "chosen_response") + end,
        "rejected": answer("rejected", "rejected_response") + end,
    }


def _two_turns(record: Record, column: str, value: Any, source: DatasetConfig) -> tuple[str, str]:
    messages = _messages(record, value, source)
    if len(messages) != 2 or not all(isinstance(message["content"], str) for message in messages):
        raise DataError(
            f"{record.place}: {column!r} is not a question and an answer, which this type needs ({len(messages)} "
            "messages). Use type: chat_template.argilla_chat, or remove the record."
        )
    return messages[0]["content"], messages[1]["content"]


def _own_format(record: Record, given: Mapping[Any, str]) -> Pair:
    """`type` as a mapping: columns, and a format for each text."""
    pair = {}
    for name in ("prompt", "chosen", "rejected"):
        text = record.get_text(given.get(f"field_{name}", name), key="type")
        form = given.get(f"{name}_format") or "{" + name + "}"
        system = record.fields.get(given.get("field_system", "system")) or ""
        pair[name] = form.replace("{system}", str(system)).replace("{" + name + "}", text)
    return pair


def _part(record: Record, column: str, source: DatasetConfig) -> Any:
    """A text, or messages."""
    value = record.get(column, key="field_chosen" if column == source.field_chosen else "field_rejected")
    return value if isinstance(value, str) else _messages(record, value, source, column)


def _messages(record: Record, value: Any, source: DatasetConfig, column: str = "messages") -> list[dict[str, Any]]:
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{record.place}: {column!r} is {json_type(value)}, not text or messages. {_CORRECT}")
    made = [
        message_of(given, source, f"message {n} of {column!r} of {record.place}") for n, given in enumerate(messages, 1)
    ]
    parts = chain.from_iterable(one["content"] for one in made if isinstance(one.get("content"), list))
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise DataError(f"{record.place}: rl: dpo takes text alone, but {column!r} has other contents. {_CORRECT}")
    return made


# --- tokens


def pair_documents(tokenizer: Any, source: DatasetConfig) -> Callable[[Sequence[Record]], list[Document]]:
    """Makes the chosen and the rejected document of each record."""
    chats: Chats | None = None

    def texts_of(record: Record) -> tuple[bool, list[str]]:
        """Whether they are plain texts, which get special tokens; the prompt, and the prompt with each answer."""
        nonlocal chats
        pair = pair_of(record, source)
        if isinstance(pair["chosen"], str):
            answers = [_with_eos(tokenizer, pair[name]) for name in ("chosen", "rejected")]
            return True, [pair["prompt"], *(pair["prompt"] + answer for answer in answers)]
        chats = chats or Chats(tokenizer=tokenizer, source=source, train_on_inputs=True)
        return False, _rendered(chats, pair, record, drop_system=source.drop_system_message)

    def documents(records: Sequence[Record]) -> list[Document]:
        texts = [texts_of(record) for record in records]
        tokens: dict[int, list[list[int]]] = {}
        for is_plain in (True, False):
            numbers = [number for number, (kind, _) in enumerate(texts) if kind is is_plain]
            if numbers:
                flat = [text for number in numbers for text in texts[number][1]]
                encoded = tokenizer(flat, add_special_tokens=is_plain, verbose=False)["input_ids"]
                tokens |= {number: encoded[3 * n : 3 * n + 3] for n, number in enumerate(numbers)}
        made = []
        for number, record in enumerate(records):
            asked, *answered = tokens[number]
            begin = min(_common(asked, ids) for ids in answered)
            made += [Document(ids=ids, labels=[IGNORED] * begin + ids[begin:], place=record.place) for ids in answered]
        return made

    return documents


def _with_eos(tokenizer: Any, answer: str) -> str:
    eos = tokenizer.eos_token
    if eos is None:
        raise ConfigError(
            "rl: dpo: the tokenizer has no eos token, with which an answer ends. Set it with special_tokens."
        )
    return answer if answer.endswith(eos) else answer + eos


def _rendered(chats: Chats, pair: Pair, record: Record, *, drop_system: bool) -> list[str]:
    """The prompt with the beginning of an answer, and the two conversations."""
    prompt = pair["prompt"]
    if drop_system and prompt and prompt[0]["role"] == "system":
        prompt = prompt[1:]
    try:
        asked, bare = chats.text(prompt, record, prompt=True), chats.text(prompt, record)
        answered = [chats.text([*prompt, *pair[name]], record) for name in ("chosen", "rejected")]
    except (TemplateError, TypeError) as error:
        raise DataError(
            f"{record.place}: the chat template fails ({str(error).rstrip('.')}). Correct the record, or set "
            "chat_template_jinja."
        ) from error
    if min(_common(asked, text) for text in answered) < _common(bare, asked):
        raise DataError(
            f"{record.place}: the chat template renders the prompt differently when an answer follows, so the answer "
            "cannot be located. Set chat_template_jinja to another template, or remove the record."
        )
    return [asked, *answered]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- rows


def _prompt_of(first: Record, source: DatasetConfig) -> str | None:
    """`Format.prompt` of a dataset."""
    if not isinstance(pair_of(first, source)["prompt"], str):
        return None
    return INSTRUCTION if source.type is None and source.prompt is None else UNKNOWN_PROMPT


def load_pairs(
    tokenizer: Any,
    datasets: Sequence[DatasetConfig],
    *,
    sequence_len: int,
    excess_length_strategy: Excess = "drop",
    val_set_size: float = 0,
    seed: int = 42,
    deduplicate: bool = False,
    fingerprints: list[str] | None = None,
    prompts: list[str | None] | None = None,
) -> tuple[Rows, Rows | None]:
    """Rows to train on, and rows to validate on if `val_set_size` is not zero. Rows 2i and 2i + 1 are a pair: its
    chosen and its rejected document. `prompts`: as in `load_rows`.
    """
    sizes, seen = [], set[int]()

    def of(source: DatasetConfig) -> Iterator[Document]:
        sizes.append(0)
        records, tokenize = read(source), pair_documents(tokenizer, source)
        first = next(records)  # reading raises if there is none
        records = chain([first], records)
        if prompts is not None and (prompt := _prompt_of(first, source)) not in prompts:
            prompts.append(prompt)
        batches = iter(lambda: list(islice(records, _RECORDS_AT_ONCE)), [])
        documents = chain.from_iterable(map(tokenize, batches))
        for chosen, rejected in zip(documents, documents, strict=True):
            content = hash((*chosen.ids, None, *rejected.ids))
            if deduplicate and content in seen:
                continue
            seen.add(content)
            sizes[-1] += 2
            yield from (chosen, rejected)

    everything = Rows.of(counted(chain.from_iterable(map(of, datasets)), "tokenizing"))
    if fingerprints is not None:
        fingerprints += [everything.fingerprint(*edges) for edges in pairwise(accumulate(sizes, initial=0))]
    check_lengths(everything, sequence_len=sequence_len, strategy=excess_length_strategy)
    fitting = cut(everything, sequence_len=sequence_len, strategy=excess_length_strategy)
    usable = trainable(fitting)
    whole = np.bincount(usable.documents // 2, minlength=len(everything) // 2) == 2
    if not whole.any():
        raise DataError(
            f"datasets: none of the {len(whole)} pairs has two answers within sequence_len ({sequence_len}). Raise it, "
            "or check the columns."
        )
    if left := int((~whole).sum()):
        log.warning("%d of %d pairs have an answer that is too long or empty and are dropped", left, len(whole))
    chosen = usable.take(np.flatnonzero(whole[usable.documents // 2] & (usable.documents % 2 == 0)))
    parts = split_off(chosen, val_set_size=val_set_size, seed=seed)
    row_of = {int(document): row for row, document in enumerate(usable.documents)}

    def both(rows: Rows) -> Rows:
        found = [row_of[int(document) + n] for document in rows.documents for n in (0, 1)]
        return usable.take(np.array(found, dtype=np.int64))

    train, validation = parts
    return both(train), None if validation is None else both(validation)


def trl_columns(rows: Rows) -> dict[str, list[Ints]]:
    """The pairs as TRL's collator takes them."""
    columns: dict[str, list[Ints]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for number in range(0, len(rows), 2):
        chosen, rejected = rows[number], rows[number + 1]
        begin = int((chosen["labels"] != IGNORED).argmax())
        columns["prompt_ids"].append(chosen["input_ids"][:begin])
        columns["chosen_ids"].append(chosen["input_ids"][begin:])
        columns["rejected_ids"].append(rejected["input_ids"][begin:])
    return columns
