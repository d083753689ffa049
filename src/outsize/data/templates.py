"""Chat templates by name, for tokenizers that have none. They mark the assistant's turns, ends included."""

from outsize.base.errors import ConfigError


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


def template_named(name: str) -> str | None:
    """None: the tokenizer's own."""
    if name.startswith("tokenizer_default"):
        return None
    if name not in TEMPLATES:
        raise ConfigError(
            f"chat_template: {name} is not among {', '.join(TEMPLATES)}. Remove the setting if the tokenizer of the "
            "model has its template, or set chat_template_jinja to the template or its file."
        )
    return TEMPLATES[name]
