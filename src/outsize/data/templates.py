"""Chat templates by name, for tokenizers that have none. They mark the assistant's turns, ends included."""

from outsize.base.errors import ConfigError
from outsize.base.log import log


def _turns(begin: str, end: str, *, assistant: str = "{{ m['role'] }}", before: str = "") -> str:
    """Each message between `begin`, which names the role, and `end`."""
    header = begin.replace("ROLE", "{{ m['role'] }}")
    answer = begin.replace("ROLE", assistant.replace("{{ m['role'] }}", "assistant"))
    return (
        before + "{% for m in messages %}{% if m['role'] == 'assistant' %}" + answer + "{% generation %}"
        "{{ m['content'] | trim }}" + end + "{% endgeneration %}{% else %}" + header + "{{ m['content'] | trim }}" + end
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}" + answer + "{% endif %}"
    )  # fmt: skip


TEMPLATES = {
    "chatml": _turns("<|im_start|>ROLE{{ '\\n' }}", "<|im_end|>{{ '\\n' }}"),
    "llama3": _turns(
        "<|start_header_id|>ROLE<|end_header_id|>{{ '\\n\\n' }}", "<|eot_id|>", before="{{ bos_token }}"
    ),
    "gemma": _turns(
        "<start_of_turn>ROLE{{ '\\n' }}", "<end_of_turn>{{ '\\n' }}", assistant="model", before="{{ bos_token }}"
    ),
    "phi_3": _turns("<|ROLE|>{{ '\\n' }}", "<|end|>{{ '\\n' }}"),
}  # fmt: skip


def template_named(name: str, *, has_own: bool) -> str | None:
    """None: the tokenizer's own. Names of other tools' templates mean the tokenizer's own, if it `has_own`."""
    fallback = name.removeprefix("tokenizer_default_fallback_")
    if has_own and (name == "tokenizer_default" or name != fallback):
        return None
    if fallback in TEMPLATES:
        return TEMPLATES[fallback]
    if has_own:
        log.warning("chat_template: %s is not among %s; the tokenizer's own is used", name, ", ".join(TEMPLATES))
        return None
    raise ConfigError(
        f"chat_template: {name} is not among {', '.join(TEMPLATES)}, and the tokenizer has no template. Set "
        "chat_template_jinja to the template or its file, or use the tokenizer of an instruct model."
    )
