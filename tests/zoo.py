"""Tiny models of every kind the engine must train, with random weights, and batches for them.

The kinds are chosen for what is odd about each: tied weights, dropout, two stacks, experts, a block that runs three times,
two dtypes in one model. All are built from configs (no download), are in train mode and take `model(**batch).loss`.

    make(name, dtype=torch.float32, tied=None, seed=0)   the model; `tied` None is the kind's own habit
    batch(name, size=2, tokens=16, seed=0)               inputs with labels; another seed is another batch
    freeze_some(model, seed=0)                           freezes about a third; odd seeds freeze a whole prefix, which then has no backward
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 97  # odd: nothing falls on a boundary by chance
HIDDEN = 32
NUM_CLASSES = 3


# --- plain modules, without transformers


@dataclass
class PlainOutput:
    loss: Tensor | None
    logits: Tensor  # (batch, tokens, vocab)


class PlainBlock(nn.Module):
    """A residual MLP. The norm computes in the dtype of its own weight, which may differ from the matrices'."""

    def __init__(self, hidden: int = HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, hidden) to the same
        normed = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return x + self.down(nn.functional.gelu(self.up(normed)))


class PlainModel(nn.Module):
    """Embedding, a ModuleList of blocks that is run through `loops` times, and a head."""

    def __init__(self, *, num_blocks: int, loops: int, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(PlainBlock() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.loops = loops
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> PlainOutput:
        x = self.embed(input_ids)
        for _ in range(self.loops):
            for layer in self.layers:
                x = layer(x)
        logits = self.head(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype))
        if labels is None:
            return PlainOutput(loss=None, logits=logits)
        # The batch's labels are its inputs, as in transformers: each position predicts the next.
        loss = nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return PlainOutput(loss=loss, logits=logits)


def _plain(dtype: torch.dtype, tied: bool, *, num_blocks: int = 4, loops: int = 1) -> nn.Module:
    return PlainModel(num_blocks=num_blocks, loops=loops, tied=tied).to(dtype)


def _mixed(dtype: torch.dtype, tied: bool) -> nn.Module:
    """bf16 matrices and fp32 norms, whatever `dtype` asks: two dtypes in every block are the point of this kind."""
    model = _plain(torch.bfloat16, tied)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.to(torch.float32)
    return model


# --- transformers


def _hf(model_class: Any, config_class: Any, dtype: torch.dtype, tied: bool, **config: Any) -> nn.Module:
    # `_from_config` sets the dtype of the weights but leaves rotary tables in fp32, as loading a checkpoint does; `.to(dtype)` would not.
    # Attention is sdpa where the kind has it and eager where not (Gemma 2: sdpa knows no soft-capping), which is transformers' own choice.
    return model_class._from_config(config_class(vocab_size=VOCAB, use_cache=False, tie_word_embeddings=tied, **config), dtype=dtype)


_DECODER = dict(
    hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def _llama(dtype: torch.dtype, tied: bool, *, num_blocks: int = 4) -> nn.Module:
    return _hf(transformers.LlamaForCausalLM, transformers.LlamaConfig, dtype, tied, **{**_DECODER, "num_hidden_layers": num_blocks})


def _qwen3(dtype: torch.dtype, tied: bool) -> nn.Module:
    return _hf(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, dtype, tied, **_DECODER)


def _gemma2(dtype: torch.dtype, tied: bool) -> nn.Module:
    # The window is shorter than a batch of 16 tokens, so that sliding and full layers really differ; the caps are low enough to bend the loss.
    capping = dict(sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
    return _hf(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, dtype, tied, **_DECODER, **capping)


def _gpt2(dtype: torch.dtype, tied: bool) -> nn.Module:
    dropout = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=1, eos_token_id=2)
    return _hf(transformers.GPT2LMHeadModel, transformers.GPT2Config, dtype, tied, n_embd=HIDDEN, n_layer=4, n_head=4, n_positions=128, **dropout)


def _mixtral(dtype: torch.dtype, tied: bool) -> nn.Module:
    experts = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return _hf(transformers.MixtralForCausalLM, transformers.MixtralConfig, dtype, tied, **_DECODER, **experts)


def _t5(dtype: torch.dtype, tied: bool) -> nn.Module:
    layers = dict(d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4)
    model: Any = _hf(transformers.T5ForConditionalGeneration, transformers.T5Config, dtype, tied, **layers, dropout_rate=0.1, decoder_start_token_id=0)
    if not tied:  # transformers ties T5's head whatever its config says; encoder and decoder share one embedding either way
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * HIDDEN**-0.5)
        model.config.tie_word_embeddings = False
    return model


def _bert(dtype: torch.dtype, tied: bool) -> nn.Module:
    if tied:
        raise ValueError("a BERT classifier has no head that could be tied to its embedding")
    layers = dict(hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=128)
    dropout = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return _hf(transformers.BertForSequenceClassification, transformers.BertConfig, dtype, tied, **layers, **dropout, num_labels=NUM_CLASSES)


# --- the table


@dataclass(frozen=True)
class Kind:
    build: Callable[..., nn.Module]
    tied: bool
    """When the caller does not say."""
    task: str = "causal"
    """`causal`, `seq2seq` or `classify`: what a batch looks like."""
    options: tuple[tuple[str, Any], ...] = ()


KINDS: dict[str, Kind] = {
    "llama": Kind(_llama, tied=True),
    "llama-untied": Kind(_llama, tied=False),
    "qwen3": Kind(_qwen3, tied=False),
    "gemma2": Kind(_gemma2, tied=True),
    "gpt2": Kind(_gpt2, tied=True),
    "mixtral": Kind(_mixtral, tied=False),
    "t5": Kind(_t5, tied=True, task="seq2seq"),
    "bert": Kind(_bert, tied=False, task="classify"),
    "plain": Kind(_plain, tied=False),
    "looped": Kind(_plain, tied=False, options=(("num_blocks", 1), ("loops", 3))),
    "one-block": Kind(_llama, tied=True, options=(("num_blocks", 1),)),
    "mixed": Kind(_mixed, tied=False),
}
NAMES: tuple[str, ...] = tuple(KINDS)


def make(name: str, dtype: torch.dtype = torch.float32, tied: bool | None = None, seed: int = 0) -> nn.Module:
    """The model in train mode. Equal arguments give equal bits; the caller's random state is left alone."""
    kind = KINDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.build(dtype, kind.tied if tied is None else tied, **dict(kind.options))
        # Fresh norms and biases are ones and zeros, which hide mistakes (a bias that was never loaded still adds nothing).
        for parameter in dict(model.named_parameters()).values():
            if parameter.ndim == 1:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def batch(name: str, size: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Inputs and labels. Encoders get a batch whose last row is padded, so that masks matter."""
    rng = torch.Generator().manual_seed(1000 + seed)
    task = KINDS[name].task
    input_ids = torch.randint(3, VOCAB, (size, tokens), generator=rng)  # 0, 1 and 2 are pad, bos and eos
    if task == "causal":
        return {"input_ids": input_ids, "labels": input_ids.clone()}
    attention_mask = torch.ones_like(input_ids)
    attention_mask[-1, tokens - tokens // 4 :] = 0
    input_ids = input_ids * attention_mask
    if task == "classify":
        labels = torch.randint(0, NUM_CLASSES, (size,), generator=rng)
    else:
        labels = torch.randint(3, VOCAB, (size, max(2, tokens // 2)), generator=rng)
        labels[-1, -1] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def freeze_some(model: nn.Module, seed: int = 0) -> tuple[str, ...]:
    """Freeze about a third of the parameters, the same ones for the same seed; returns their canonical names.

    Even seeds scatter them: blocks hold frozen and trainable parameters side by side. Odd seeds freeze the first third in the order of
    `named_parameters()`: embedding and first blocks, so that those have no backward (a tied head is frozen with its embedding).
    The very last parameter always trains, so that there is a gradient.
    """
    names = [name for name, _ in model.named_parameters()]
    count = max(1, len(names) // 3)
    frozen = names[:count] if seed % 2 else sorted(random.Random(seed).sample(names[:-1], count), key=names.index)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return tuple(frozen)
