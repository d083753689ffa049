"""Tiny models of every kind the engine must train, with random weights, and batches for them.

The kinds are chosen for what is odd about each: tied weights, dropout, two stacks, experts (also such as no token comes
to), a block that runs three times, two dtypes in one model, layers of two kinds, images. All are built from configs (no
download), are in train mode and take `model(**batch).loss`.

    make(name, dtype=torch.float32, tied=None, seed=0)   the model; `tied` None is the kind's own habit batch(name,
    size=2, tokens=16, seed=0)               inputs with labels; another seed is another batch freeze_some(model,
    seed=0)                           freezes about a third; odd seeds freeze a whole prefix, which then has no backward
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


class RoutedBlock(PlainBlock):
    """A residual MLP per expert. Which one a token goes to is read off the token, so that a batch decides which of them
    get none, and no gradient.
    """

    def __init__(self, num_experts: int = 4):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_experts))

    def forward(self, x: Tensor, *, expert: Tensor) -> Tensor:  # type: ignore[override]  # expert: (batch, tokens)
        x = super().forward(x)
        out = torch.zeros_like(x)
        for i in expert.unique().tolist():
            chosen = expert == i
            out[chosen] = torch.tanh(self.experts[i](x[chosen]))
        return x + out


class RoutedModel(PlainModel):
    """Experts of every batch: those of the tokens in it. The vocabulary has as many tokens for each."""

    def __init__(self, *, num_blocks: int, tied: bool):
        super().__init__(num_blocks=num_blocks, loops=1, tied=tied)
        self.layers = nn.ModuleList(RoutedBlock() for _ in range(num_blocks))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> PlainOutput:
        x, expert = self.embed(input_ids), input_ids * 4 // VOCAB
        for layer in self.layers:
            x = layer(x, expert=expert)
        logits = self.head(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype))
        loss = (
            nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
            if labels is not None
            else None
        )
        return PlainOutput(loss=loss, logits=logits)


def _routed(dtype: torch.dtype, tied: bool) -> nn.Module:
    return RoutedModel(num_blocks=3, tied=tied).to(dtype)


def _mixed(dtype: torch.dtype, tied: bool) -> nn.Module:
    """bf16 matrices and fp32 norms, whatever `dtype` asks: two dtypes in every block are the point of this kind."""
    model = _plain(torch.bfloat16, tied)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.to(torch.float32)
    return model


# --- transformers


def _hf(model_class: Any, config_class: Any, dtype: torch.dtype, tied: bool, **config: Any) -> nn.Module:
    # `_from_config` sets the dtype of the weights but leaves rotary tables in fp32, as loading a checkpoint does;
    # `.to(dtype)` would not. Attention is sdpa where the kind has it and eager where not (Gemma 2: sdpa knows no
    # soft-capping), which is transformers' own choice.
    return model_class._from_config(
        config_class(vocab_size=VOCAB, use_cache=False, tie_word_embeddings=tied, **config), dtype=dtype
    )


_DECODER = dict(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _llama(dtype: torch.dtype, tied: bool, *, num_blocks: int = 4) -> nn.Module:
    return _hf(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        dtype,
        tied,
        **{**_DECODER, "num_hidden_layers": num_blocks},
    )


def _qwen3(dtype: torch.dtype, tied: bool) -> nn.Module:
    return _hf(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, dtype, tied, **_DECODER)


def _gemma2(dtype: torch.dtype, tied: bool) -> nn.Module:
    # The window is shorter than a batch of 16 tokens, so that sliding and full layers really differ; the caps are low
    # enough to bend the loss.
    capping = dict(sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
    return _hf(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, dtype, tied, **_DECODER, **capping)


def _gpt2(dtype: torch.dtype, tied: bool) -> nn.Module:
    dropout = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=1, eos_token_id=2)
    return _hf(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        dtype,
        tied,
        n_embd=HIDDEN,
        n_layer=4,
        n_head=4,
        n_positions=128,
        **dropout,
    )


def _mixtral(dtype: torch.dtype, tied: bool) -> nn.Module:
    experts = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return _hf(transformers.MixtralForCausalLM, transformers.MixtralConfig, dtype, tied, **_DECODER, **experts)


def _t5(dtype: torch.dtype, tied: bool) -> nn.Module:
    layers = dict(d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4)
    model: Any = _hf(
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        dtype,
        tied,
        **layers,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    if (
        not tied
    ):  # transformers ties T5's head whatever its config says; encoder and decoder share one embedding either way
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * HIDDEN**-0.5)
        model.config.tie_word_embeddings = False
    return model


def _bert(dtype: torch.dtype, tied: bool) -> nn.Module:
    if tied:
        raise ValueError("a BERT classifier has no head that could be tied to its embedding")
    layers = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    dropout = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return _hf(
        transformers.BertForSequenceClassification,
        transformers.BertConfig,
        dtype,
        tied,
        **layers,
        **dropout,
        num_labels=NUM_CLASSES,
    )


def _llama_classes(dtype: torch.dtype, tied: bool) -> nn.Module:
    if tied:
        raise ValueError("a classifier has no head that could be tied to its embedding")
    few = {**_DECODER, "num_hidden_layers": 3}
    return _hf(
        transformers.LlamaForSequenceClassification,
        transformers.LlamaConfig,
        dtype,
        tied,
        **few,
        num_labels=NUM_CLASSES,
    )


def _modernbert(dtype: torch.dtype, tied: bool) -> nn.Module:
    """Every second layer sees all tokens, the others a window of 8."""
    if tied:
        raise ValueError("a classifier has no head that could be tied to its embedding")
    layers = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    layers |= dict(bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    odd = dict(
        global_attn_every_n_layers=2, local_attention=8, attention_dropout=0.1, mlp_dropout=0.1, num_labels=NUM_CLASSES
    )
    return _hf(
        transformers.ModernBertForTokenClassification, transformers.ModernBertConfig, dtype, tied, **layers, **odd
    )


def _qwen3_next(dtype: torch.dtype, tied: bool) -> nn.Module:
    """Layers of linear attention (a gated delta rule) and of full attention, with experts in all but the first."""
    few = {**_DECODER, "num_hidden_layers": 3}
    linear = dict(
        linear_conv_kernel_dim=3,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    experts = dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        mlp_only_layers=[0],
    )
    types = ["linear_attention", "full_attention", "linear_attention"]
    return _hf(
        transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig,
        dtype,
        tied,
        **few,
        **linear,
        **experts,
        layer_types=types,
    )


# --- with images

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 93, 94, 95, 96
_TEXT = {**_DECODER, "num_hidden_layers": 3, "vocab_size": VOCAB, "use_cache": False}
_SPECIAL = dict(
    image_token_id=IMAGE_TOKEN,
    video_token_id=VIDEO_TOKEN,
    vision_start_token_id=VISION_START,
    vision_end_token_id=VISION_END,
)
_MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])


def _vl(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    return model_class._from_config(config, dtype=dtype)


def _qwen25_vl(dtype: torch.dtype, tied: bool) -> nn.Module:
    """Vision layers with attention in windows and, one of them, over whole images."""
    vision = dict(
        depth=4,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        patch_size=4,
        window_size=16,
        out_hidden_size=HIDDEN,
        fullatt_block_indexes=[1],
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, tie_word_embeddings=tied, **_SPECIAL
    )
    return _vl(transformers.Qwen2_5_VLForConditionalGeneration, config, dtype)


def _qwen3_vl(dtype: torch.dtype, tied: bool) -> nn.Module:
    """Features of the middle of the vision tower enter behind the first layers of the text."""
    vision = dict(
        depth=4,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        patch_size=4,
        out_hidden_size=HIDDEN,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 2],
    )
    text = {**_TEXT, "num_hidden_layers": 4, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **_SPECIAL)
    return _vl(transformers.Qwen3VLForConditionalGeneration, config, dtype)


def _llava(dtype: torch.dtype, tied: bool) -> nn.Module:
    """Features are taken before the last vision layer, which runs all the same and gets no gradient."""
    vision = dict(
        model_type="clip_vision_model",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama", "tie_word_embeddings": tied},
        vision_config=vision,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
        tie_word_embeddings=tied,
    )
    return _vl(transformers.LlavaForConditionalGeneration, config, dtype)


def _llava_next(dtype: torch.dtype, tied: bool) -> nn.Module:
    """Pictures are seen whole and in crops, rows of which end with a weight of the model itself. What was seen is
    returned beside the loss.
    """
    vision = dict(
        model_type="clip_vision_model",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=8,
        patch_size=8,
    )
    config = transformers.LlavaNextConfig(
        text_config={**_TEXT, "model_type": "llama", "tie_word_embeddings": tied},
        vision_config=vision,
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=[[8, 16]],
        tie_word_embeddings=tied,
    )
    return _vl(transformers.LlavaNextForConditionalGeneration, config, dtype)


# --- the table


@dataclass(frozen=True)
class Kind:
    build: Callable[..., nn.Module]
    tied: bool
    """When the caller does not say."""
    task: str = "causal"
    """`causal`, `routed`, `seq2seq`, `classify`, `tag`, `patches`, `image` or `crops`: what a batch looks like."""
    options: tuple[tuple[str, Any], ...] = ()
    idle: tuple[str, ...] = ()
    """How the names of parameters begin that no gradient comes to, with the batch of seed 0."""


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
    "llama-classes": Kind(_llama_classes, tied=False, task="classify"),
    "modernbert": Kind(_modernbert, tied=False, task="tag"),
    "qwen3-next": Kind(_qwen3_next, tied=False),
    "routed": Kind(_routed, tied=False, task="routed", idle=tuple(f"layers.{i}.experts.0." for i in range(3))),
    "qwen2.5-vl": Kind(_qwen25_vl, tied=False, task="patches"),
    "qwen3-vl": Kind(_qwen3_vl, tied=True, task="patches"),
    "llava": Kind(
        _llava,
        tied=False,
        task="image",
        idle=("model.vision_tower.encoder.layers.3.", "model.vision_tower.post_layernorm."),
    ),
    "llava-next": Kind(
        _llava_next,
        tied=False,
        task="crops",
        idle=("model.vision_tower.encoder.layers.3.", "model.vision_tower.post_layernorm."),
    ),
}
NAMES: tuple[str, ...] = tuple(KINDS)


def make(name: str, dtype: torch.dtype = torch.float32, tied: bool | None = None, seed: int = 0) -> nn.Module:
    """The model in train mode. Equal arguments give equal bits; the caller's random state is left alone."""
    kind = KINDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.build(dtype, kind.tied if tied is None else tied, **dict(kind.options))
        # Fresh norms and biases are ones and zeros, which hide mistakes (a bias that was never loaded still adds
        # nothing).
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
    if task == "routed":  # one of the experts gets no token, with every seed another
        left_out = input_ids * 4 // VOCAB == seed % 4
        input_ids = input_ids.where(~left_out, (input_ids + 25) % VOCAB).clamp(min=3)
        return {"input_ids": input_ids, "labels": input_ids.clone()}
    if task in ("patches", "image", "crops"):
        return _with_images(task, input_ids.clamp(max=IMAGE_TOKEN - 1), rng)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[-1, tokens - tokens // 4 :] = 0
    input_ids = input_ids * attention_mask
    if task == "classify":
        labels = torch.randint(0, NUM_CLASSES, (size,), generator=rng)
    elif task == "tag":
        labels = torch.randint(0, NUM_CLASSES, (size, tokens), generator=rng).where(attention_mask.bool(), -100)
    else:
        labels = torch.randint(3, VOCAB, (size, max(2, tokens // 2)), generator=rng)
        labels[-1, -1] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _with_images(task: str, input_ids: Tensor, rng: torch.Generator) -> dict[str, Tensor]:
    """An image of 4 tokens at the second place of every row, and one of 2 tokens more in the first row where images may
    differ in size.
    """
    size = input_ids.shape[0]
    labels = input_ids.clone()
    if task == "image":
        input_ids[:, 1:5] = IMAGE_TOKEN  # 8 x 8 pixels in patches of 4 x 4
        extra = {"pixel_values": torch.randn(size, 3, 8, 8, generator=rng)}
    elif task == "crops":
        input_ids[:, 1:5] = IMAGE_TOKEN  # 8 x 16 pixels: the whole, two crops, and the end of their row
        extra = {
            "pixel_values": torch.randn(size, 3, 3, 8, 8, generator=rng),
            "image_sizes": torch.tensor([[8, 16]] * size),
        }
    else:
        grids = [[1, 4, 4]] * size + [[1, 2, 4]]  # in patches; 2 x 2 of them make one token
        input_ids[:, 1:7] = torch.tensor([VISION_START, *[IMAGE_TOKEN] * 4, VISION_END])
        input_ids[-1, 8:12] = torch.tensor([VISION_START, *[IMAGE_TOKEN] * 2, VISION_END])
        patches = sum(t * h * w for t, h, w in grids)
        extra = {
            "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, generator=rng),
            "image_grid_thw": torch.tensor(grids),
        }
        extra["mm_token_type_ids"] = (input_ids == IMAGE_TOKEN).int()
    labels[input_ids >= IMAGE_TOKEN] = -100
    return {"input_ids": input_ids, "labels": labels, **extra}


def freeze_some(model: nn.Module, seed: int = 0) -> tuple[str, ...]:
    """Freeze about a third of the parameters, the same ones for the same seed; returns their canonical names.

    Even seeds scatter them: blocks hold frozen and trainable parameters side by side. Odd seeds freeze the first third
    in the order of `named_parameters()`: embedding and first blocks, so that those have no backward (a tied head is
    frozen with its embedding). The very last parameter always trains, so that there is a gradient.
    """
    names = [name for name, _ in model.named_parameters()]
    count = max(1, len(names) // 3)
    frozen = names[:count] if seed % 2 else sorted(random.Random(seed).sample(names[:-1], count), key=names.index)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return tuple(frozen)
