"""Language models of transformers: decoders, experts, encoders, encoder-decoders, state spaces."""

from typing import Any

import torch
import zoo
from kinds.families import HIDDEN, LABELS, VOCAB, Family, Rng, causal, hf, masked, seq2seq, tokens

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GROUPED = dict(num_key_value_heads=2)
_DROPOUT = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
_SEQ2SEQ = dict(
    vocab_size=VOCAB,
    d_model=HIDDEN,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    dropout=0.1,
)


def _decoder(name: str, **settings: Any) -> Family:
    return hf(f"{name}ForCausalLM", f"{name}Config", causal, **{**_SIZES, **settings})


def _encoder(name: str, head: str = "ForMaskedLM", **settings: Any) -> Family:
    return hf(f"{name}{head}", f"{name}Config", masked, **{**_SIZES, **_DROPOUT, **settings})


def _seq2seq(name: str, head: str = "ForConditionalGeneration", **settings: Any) -> Family:
    return hf(f"{name}{head}", f"{name}Config", seq2seq, **{**_SEQ2SEQ, **settings})


def _of_zoo(name: str) -> Family:
    return Family(build=lambda: zoo.make(name), batch=lambda rng: zoo.batch(name, seed=rng.initial_seed()))


def _long(rng: Rng) -> dict[str, Any]:
    """Long enough for attention in windows and blocks."""
    input_ids = tokens(rng, 32, rows=1)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}


def _long_seq2seq(rng: Rng) -> dict[str, Any]:
    return {**_long(rng), "labels": tokens(rng, 8, rows=1)}


def _classes(rng: Rng) -> dict[str, Any]:
    return {**masked(rng), "labels": torch.randint(0, LABELS, (2,), generator=rng)}


_MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
_DEEPSEEK_EXPERTS = dict(
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.0,
)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)

DECODERS: dict[str, Family] = {
    **{name: _of_zoo(name) for name in ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "qwen3-next")},
    "qwen2": _decoder("Qwen2", **_GROUPED),
    "qwen3-moe": _decoder(
        "Qwen3Moe",
        **_GROUPED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
    ),
    "gemma3": hf(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        causal,
        **_SIZES,
        **_GROUPED,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt-neo": _decoder(
        "GPTNeo",
        num_layers=4,
        num_hidden_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
    ),
    "gpt-neox": _decoder("GPTNeoX"),
    "gptj": _decoder("GPTJ", n_embd=HIDDEN, n_layer=3, n_head=4, rotary_dim=4, n_positions=64),
    "opt": _decoder("OPT", ffn_dim=48, word_embed_proj_dim=16),
    "bloom": _decoder("Bloom", n_layer=3, n_head=4),
    "mpt": _decoder("Mpt", d_model=HIDDEN, n_layers=3, n_heads=4, max_seq_len=64),
    "falcon": _decoder(
        "Falcon", new_decoder_architecture=False, multi_query=True, parallel_attn=True, alibi=False, bias=False
    ),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3", **_GROUPED),
    "mistral": _decoder("Mistral", **_GROUPED, sliding_window=4),
    "olmo2": _decoder("Olmo2", **_GROUPED),
    "olmoe": _decoder("Olmoe", num_experts=4, num_experts_per_tok=2),
    "deepseek-v2": _decoder("DeepseekV2", **_MLA, **_DEEPSEEK_EXPERTS),
    "deepseek-v3": _decoder("DeepseekV3", **_MLA, **_DEEPSEEK_EXPERTS),
    "gpt-oss": _decoder("GptOss", **_GROUPED, **_EXPERTS, head_dim=8, sliding_window=4),
    "granite": _decoder("Granite", **_GROUPED),
    "granite-moe": _decoder("GraniteMoe", **_GROUPED, **_EXPERTS),
    "cohere2": _decoder("Cohere2", **_GROUPED, sliding_window=4),
    "stablelm": _decoder("StableLm", **_GROUPED),
    "starcoder2": _decoder("Starcoder2", **_GROUPED),
    "llama4": hf(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        causal,
        **_SIZES,
        **_GROUPED,
        **_EXPERTS,
        head_dim=8,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
        attention_chunk_size=8,
    ),
    "minimax": _decoder(
        "MiniMax",
        **_GROUPED,
        **_EXPERTS,
        head_dim=8,
        block_size=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "xlnet": hf(
        "XLNetLMHeadModel", "XLNetConfig", causal, vocab_size=VOCAB, d_model=HIDDEN, n_layer=3, n_head=4, d_inner=48
    ),
    "gemma3n": hf(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        causal,
        needs_timm=True,
        **{**_SIZES, "num_hidden_layers": 4},
        **_GROUPED,
        head_dim=8,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        sliding_window=4,
        activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4": hf(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        causal,
        **{**_SIZES, "num_hidden_layers": 4},
        **_GROUPED,
        head_dim=8,
        global_head_dim=8,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
}

_MAMBA2 = dict(num_heads=8, head_dim=8, state_size=4, n_groups=1, chunk_size=4, expand=2, conv_kernel=3)
STATE_SPACES: dict[str, Family] = {
    "mamba": _decoder("Mamba", state_size=4, conv_kernel=3, num_hidden_layers=2),
    "mamba2": _decoder("Mamba2", **_MAMBA2),
    "rwkv": _decoder("Rwkv", attention_hidden_size=HIDDEN, context_length=16, num_hidden_layers=2),
    "jamba": _decoder(
        "Jamba",
        **_GROUPED,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "falcon-h1": _decoder(
        "FalconH1",
        **_GROUPED,
        head_dim=8,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_chunk_size=4,
        mamba_n_groups=1,
    ),
    "zamba2": _decoder(
        "Zamba2",
        **{"num_hidden_layers": 4},
        num_key_value_heads=4,
        hybrid_layer_ids=[1, 3],
        num_mem_blocks=1,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=4,
        adapter_rank=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    ),  # layer 1 has layer 3's adapter
    "recurrent-gemma": _decoder(
        "RecurrentGemma",
        **_GROUPED,
        lru_width=HIDDEN,
        conv1d_width=3,
        attention_window_size=4,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "lfm2": _decoder("Lfm2", **_GROUPED, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3),
}

ENCODERS: dict[str, Family] = {
    **{name: _of_zoo(name) for name in ("bert", "modernbert")},
    "roberta": _encoder("Roberta", max_position_embeddings=66),
    "electra": _encoder("Electra", embedding_size=16),
    "albert": _encoder("Albert", embedding_size=16, num_hidden_groups=1, inner_group_num=2),
    "albert-groups": _encoder("Albert", embedding_size=16, num_hidden_layers=4, num_hidden_groups=2),
    "distilbert": _encoder("DistilBert", dim=HIDDEN, hidden_dim=48, n_layers=3, n_heads=4),
    "deberta": _encoder("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False),
    "deberta-v2": _encoder(
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        conv_kernel_size=3,
        conv_act="gelu",
        position_buckets=4,
        norm_rel_ebd="layer_norm",
    ),
    "funnel": hf(
        "FunnelForMaskedLM",
        "FunnelConfig",
        masked,
        vocab_size=VOCAB,
        block_sizes=[2, 1],
        num_decoder_layers=1,
        d_model=HIDDEN,
        n_head=4,
        d_head=8,
        d_inner=48,
    ),
    "longformer": hf(
        "LongformerForMaskedLM",
        "LongformerConfig",
        _long,
        **_SIZES | {"max_position_embeddings": 80},
        attention_window=[8, 8, 8],
    ),
    "big-bird": hf(
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        _long,
        **_SIZES,
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=1,
    ),
    "fnet": hf(
        "FNetForMaskedLM",
        "FNetConfig",
        lambda rng: {k: v for k, v in masked(rng).items() if k != "attention_mask"},
        **_SIZES,
    ),
    "convbert": _encoder("ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=2, num_groups=1),
    "mobilebert": _encoder(
        "MobileBert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2, true_hidden_size=16
    ),
    "squeezebert": _encoder("SqueezeBert", embedding_size=HIDDEN),
    "perceiver": hf(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        masked,
        vocab_size=VOCAB,
        d_model=16,
        d_latents=16,
        num_latents=4,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        max_position_embeddings=12,
        qk_channels=16,
        v_channels=16,
    ),
    "reformer": hf(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        causal,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        attention_head_size=16,
        attn_layers=["local", "lsh"],
        feed_forward_size=48,
        is_decoder=True,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        num_hashes=1,
        axial_pos_embds=False,
        max_position_embeddings=16,
        hash_seed=0,
        eos_token_id=2,
        pad_token_id=0,
        refused=r"no backward of a block that reads it \(reformer.encoder.layers.0\) was seen",
    ),  # its layers run their own backward
}

ENCODER_DECODERS: dict[str, Family] = {
    "t5": _of_zoo("t5"),
    "bart": _seq2seq("Bart"),
    "mbart": _seq2seq("MBart", layerdrop=0.0),
    "marian": _seq2seq("Marian", head="MTModel"),
    "pegasus": _seq2seq("Pegasus"),
    "pegasus-x": hf(
        "PegasusXForConditionalGeneration",
        "PegasusXConfig",
        _long_seq2seq,
        **_SEQ2SEQ,
        num_global_tokens=2,
        block_size=8,
    ),
    "led": hf(
        "LEDForConditionalGeneration",
        "LEDConfig",
        _long_seq2seq,
        **_SEQ2SEQ,
        attention_window=[8, 8, 8],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "bigbird-pegasus": hf(
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        _long_seq2seq,
        **_SEQ2SEQ,
        block_size=4,
        num_random_blocks=1,
    ),
    "longt5": hf(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        _long_seq2seq,
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        local_radius=4,
        global_block_size=4,
        encoder_attention_type="transient-global",
        decoder_start_token_id=0,
    ),
    "switch": hf(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        seq2seq,
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=16,
        decoder_start_token_id=0,
    ),
    "prophetnet": hf(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        seq2seq,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        ngram=2,
    ),
}

TEXT = {**DECODERS, **STATE_SPACES, **ENCODERS, **ENCODER_DECODERS}
