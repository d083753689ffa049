"""`outsize chat`: generates text with the model of a result folder, for a quick look.

On a GPU, the model is prepared for forward passes: weights that do not fit are streamed for every token.
"""

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoTokenizer, TextStreamer

from outsize.base.errors import BadFile, ConfigError, PlanInfeasible
from outsize.base.log import log
from outsize.checkpoint.folder import checkpoints
from outsize.data.formats import INSTRUCTION
from outsize.device.choose import choose_device
from outsize.run.compat_checks import first_line
from outsize.run.prompt_format import prompt_format, read_prompts
from outsize.run.result_folder import base_of, load_adapted, load_model, require_folder
from outsize.runtime.engine import Engine
from outsize.setup.prepare import prepare

Message = dict[str, Any]

_CONTEXT_TOKENS = 4096
"""Of a conversation, if the model has as many positions."""
_ENCODER_TOKENS = 512
"""The same of an encoder-decoder."""
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
_TEXT = "It is plain text of many words, repeated to the length of a conversation. "


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    folder: Path
    base: str | None = None
    """The adapter's base, if it has moved."""
    device: str | None = None
    gpu_memory: str | None = None
    max_new_tokens: int = 512
    temperature: float | None = None
    """0: greedy. None: as the model's generation config says."""
    system: str | None = None
    raw: bool = False
    """Prompts are continued as given."""


class Chat:
    """A conversation with a model. Without a chat template, each prompt is answered by itself."""

    def __init__(self, request: ChatRequest):
        self._request = request
        folder = self.folder = _folder_with_model(request.folder)
        base = base_of(folder, request.base) if require_folder(folder) else None
        form, self.note = (INSTRUCTION, "") if request.raw else prompt_format(read_prompts(folder))
        self._prompts = Prompts(_load_tokenizer(folder, base), request.system, form)
        self.has_template = self._prompts.has_template
        model = self._model = load_model(folder) if base is None else load_adapted(folder, base)
        usual = _ENCODER_TOKENS if model.config.is_encoder_decoder else _CONTEXT_TOKENS
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or usual
        self._context = min(positions, max(usual, 2 * request.max_new_tokens))
        self._generation = _generation_config(model, self._prompts, request.temperature)
        self._engine = self._prepare()
        self._messages: list[Message] = []
        self.is_cut = self._is_stopped = False
        """`is_cut`: whether the last answer ended at its maximum length."""

    def _prepare(self) -> Engine | None:
        """None: the model runs on the CPU."""
        request = self._request
        device = choose_device(request.device)
        if not device.has_own_memory:
            if request.gpu_memory is not None:
                raise ConfigError("--gpu-memory: the model runs on the CPU. Leave it out, or name a GPU with --device.")
            return None
        ids = self._prompts.encode(_TEXT * (self._context // 8 + 1))[:, : self._context]
        batch = {"input_ids": ids, **({"decoder_input_ids": ids} if self._model.config.is_encoder_decoder else {})}
        known = inspect.signature(type(_without_adapter(self._model)).forward).parameters
        settings = {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in known else {})}

        def forward(model: nn.Module, batch: dict[str, Tensor]) -> None:
            model(**batch, **settings)

        budget = request.gpu_memory
        try:
            return prepare(self._model, batch, device=device, gpu_memory=budget, loss=forward, chunked_loss=False)
        except PlanInfeasible as error:
            if request.gpu_memory is not None or request.device is not None:
                raise
            log.warning("the model runs on the CPU, slower: %s", error)
            return None

    @property
    def summary(self) -> str:
        """What runs where."""
        name = type(_without_adapter(self._model)).__name__
        if self._engine is None:
            return f"{self.folder}: {name}, on the CPU"
        device, homes = self._engine.device, self._engine.plan.decision.homes
        streamed = sum(home.weights == "host" for home in homes)
        how = f"; {streamed} of {len(homes)} chunks of its weights are streamed for every token" if streamed else ""
        return f"{self.folder}: {name}, on {'a simulated ' if device.is_simulated else ''}{device.spec.name}{how}"

    def answer(self, text: str) -> str:
        """Print the answer while it is generated, and return it."""
        self._forget_oldest(text)
        ids = self._prompts.tokens(self._messages, text)
        if not ids.numel():
            raise ConfigError("prompt: it is empty. Write some text.")
        room = self._context - (0 if self._model.config.is_encoder_decoder else ids.shape[1])
        if room < 1 or ids.shape[1] > self._context:
            raise ConfigError(f"prompt: {ids.shape[1]} tokens, of at most {self._context - 1}. Shorten it.")
        generation = copy.deepcopy(self._generation)
        generation.max_new_tokens = min(room, self._request.max_new_tokens)
        tokenizer, self._is_stopped = self._prompts.tokenizer, False
        inputs = ids if self._engine is None else self._engine.device.put(ids)
        output = self._model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=generation,
            stopping_criteria=[lambda ids, scores: torch.full(ids.shape[:1], self._is_stopped, device=ids.device)],
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )[0].tolist()
        new = output[1 if self._model.config.is_encoder_decoder else ids.shape[1] :]
        self.is_cut = len(new) == generation.max_new_tokens and new[-1] not in (generation.eos_token_id or ())
        answer: str = tokenizer.decode(new, skip_special_tokens=True)
        if self.has_template:
            self._messages += [_message("user", text), _message("assistant", answer)]
        return answer

    def stop(self) -> None:
        """End the answer after its next token. Called by a signal handler; at the second call, interrupt at once."""
        if self._is_stopped:
            raise KeyboardInterrupt
        self._is_stopped = True

    def restart(self) -> None:
        """Forget the conversation."""
        self._messages.clear()

    def close(self) -> None:
        """End the engine; the model cannot be used after it."""
        if self._engine is not None:
            self._engine.close()

    def _forget_oldest(self, text: str) -> None:
        """Drop the oldest questions and answers until there is room for an answer."""
        limit = self._context - min(self._request.max_new_tokens, self._context // 2)
        while self._messages and self._prompts.tokens(self._messages, text).shape[1] > limit:
            del self._messages[:2]


class Prompts:
    """Makes tokens of conversations with the tokenizer's chat template, or of single texts.

    `form`: the format of prompts in place of the chat template.
    """

    def __init__(self, tokenizer: Any, system: str | None, form: str | None = None):
        self.tokenizer, self.has_template = tokenizer, form is None and bool(tokenizer.chat_template)
        self._form = form or INSTRUCTION
        if system is not None and not self.has_template:
            why = "the tokenizer has no chat template" if form is None else "prompts are not in the chat template"
            raise ConfigError(f"--system: {why}. Leave it out.")
        self._system = [] if system is None else [_message("system", system)]
        # Templates of models with images may show contents only in parts.
        self._in_parts = False
        self._in_parts = self.has_template and not self._shows_text()

    def encode(self, text: str, **settings: Any) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt", **settings).input_ids
        return ids

    def tokens(self, messages: list[Message], text: str) -> Tensor:
        if not self.has_template:
            return self.encode(self._form.replace(INSTRUCTION, text) if text else "")
        rendered = self._render([*self._system, *messages, _message("user", text)], prompt=True)
        return self.encode(rendered, add_special_tokens=False)

    @property
    def end_of_turn(self) -> int | None:
        """The token that ends an answer in the template. The generation config of a base model may lack it."""
        if not self.has_template:
            return None
        text = self._render([_message("user", _TEXT), _message("assistant", _TEXT)])
        behind = text.rpartition(_TEXT.strip())[2].strip()
        ids = self.tokenizer(behind, add_special_tokens=False).input_ids
        return ids[0] if ids and ids[0] in self.tokenizer.added_tokens_decoder else None

    def _shows_text(self) -> bool:
        try:
            return _TEXT.strip() in self._render([_message("user", _TEXT)])
        except ConfigError:
            return False

    def _render(self, messages: list[Message], *, prompt: bool = False) -> str:
        if self._in_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            return text
        except (TemplateError, TypeError) as error:
            advice = "Leave --system out" if messages[0]["role"] == "system" else "Correct chat_template.jinja"
            raise ConfigError(f"The chat template fails ({first_line(error)}). {advice}.") from None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _folder_with_model(folder: Path) -> Path:
    """The folder, or its newest complete checkpoint if the run has not ended."""
    if not (folder / "config.json").exists() and not (folder / "adapter_config.json").exists():
        return max(checkpoints(folder), default=(0, folder))[1]
    return folder


def _load_tokenizer(folder: Path, base: str | None) -> Any:
    """The folder's tokenizer. An adapter without one uses its base's."""
    has_own = any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES)
    if not has_own and base is None:
        raise BadFile(
            f"{folder}: no tokenizer in the folder. Save one into it: tokenizer.save_pretrained({str(folder)!r})."
        )
    try:
        return AutoTokenizer.from_pretrained(folder if has_own else base)
    except (OSError, ValueError, KeyError) as error:
        raise BadFile(
            f"{folder if has_own else base}: its tokenizer cannot be loaded ({first_line(error)}). Save one into "
            f"{folder}."
        ) from None


def _generation_config(model: Any, prompts: Prompts, temperature: float | None) -> Any:
    config = copy.deepcopy(model.generation_config)
    given, tokenizer = config.eos_token_id, prompts.tokenizer
    ends = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id, prompts.end_of_turn} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), None)
    config.update(eos_token_id=sorted(ends) or None, pad_token_id=pad, num_beams=1, use_cache=True, max_length=None)
    if temperature == 0:
        config.update(do_sample=False, temperature=None, top_k=None, top_p=None)
    elif temperature is not None:
        config.update(do_sample=True, temperature=temperature)
    return config


def _without_adapter(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
