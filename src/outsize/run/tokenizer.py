"""The tokenizer of a run: its source, special tokens and chat template."""

from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.config.run import RunConfig
from outsize.data.templates import template_named
from outsize.run.compat_checks import first_line


def load_tokenizer(config: RunConfig, processor: Any = None) -> Any:
    """`processor`: that of a run with images. It gets the tokenizer; its chat template is the tokenizer's default."""
    key = "base_model" if config.tokenizer_config is None else "tokenizer_config"
    source = config.tokenizer_config or config.base_model
    try:
        # Without a decision of the user transformers would ask on the terminal.
        trusts = config.prune is not None and config.prune.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trusts)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{key}: {source} has no usable tokenizer ({first_line(error)}). Save one into the folder."
        ) from None
    _set_tokens(tokenizer, config)
    if processor is not None:
        tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    if config.chat_template_jinja is not None:
        tokenizer.chat_template = _template(config.chat_template_jinja)
    elif config.chat_template is not None:
        named = template_named(config.chat_template, has_own=bool(tokenizer.chat_template))
        tokenizer.chat_template = named or tokenizer.chat_template
    if processor is not None:
        if tokenizer.pad_token is None:
            raise ConfigError(
                f"{key}: the tokenizer has no pad token, which the processor of {source} pads with. Set "
                "special_tokens: {pad_token: …} to a token of the vocabulary."
            )
        processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    return tokenizer


def _set_tokens(tokenizer: Any, config: RunConfig) -> None:
    """A token that is not in the vocabulary would have no embedding. Padding needs none: it is masked."""
    vocabulary = tokenizer.get_vocab()
    roles = {name: token for name, token in (config.special_tokens or {}).items() if token}
    if (pad := roles.get("pad_token")) is not None and pad not in vocabulary:
        log.info("special_tokens: the tokenizer has no token %s; padding needs none of its own", pad)
        del roles["pad_token"]
    used = [token for value in roles.values() for token in (value if isinstance(value, list) else [value])]
    for key, tokens in (("special_tokens", used), ("tokens", config.tokens)):
        if missing := [str(token) for token in tokens if token not in vocabulary]:
            raise ConfigError(
                f"{key}: the tokenizer's vocabulary lacks {', '.join(missing)}. Add tokens once with transformers "
                "(tokenizer.add_tokens, model.resize_token_embeddings), save both and name that folder."
            )
    tokenizer.add_special_tokens(roles)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in config.tokens])


def _template(written: str) -> str:
    if "{" in written:  # a template without one would render all chats alike
        return written
    try:
        return Path(written).read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"chat_template_jinja: {written} is no template and cannot be read as a file ({error}). Correct the path; "
            "a template contains {{ }} or {% %}."
        ) from None
