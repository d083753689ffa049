"""Speech, codecs and time series of transformers."""

from typing import Any

import torch
from kinds.families import HIDDEN, VOCAB, Family, Rng, hf, tokens

_SIZES: dict[str, Any] = dict(hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
_WAVE: dict[str, Any] = dict(
    **_SIZES,
    vocab_size=VOCAB,
    conv_dim=(16, 16),
    conv_stride=(5, 4),
    conv_kernel=(10, 8),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    layerdrop=0.0,
    mask_time_length=2,
    mask_time_prob=0.2,
    mask_feature_length=2,
    num_codevectors_per_group=8,
    codevector_dim=16,
    proj_codevector_dim=16,
    ctc_loss_reduction="mean",
    pad_token_id=0,
)


def _wave(rng: Rng) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400, generator=rng), "labels": tokens(rng, 4)}


def _spoken(rng: Rng) -> dict[str, Any]:
    return {
        "input_ids": tokens(rng),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "labels": torch.randn(2, 8, 8, generator=rng),
        "speaker_embeddings": torch.randn(2, 8, generator=rng),
    }


def _mel(bins: int, frames: int, key: str = "input_features", last: bool = True) -> Any:
    def batch(rng: Rng) -> dict[str, Any]:
        shape = (2, frames, bins) if last else (2, bins, frames)
        return {key: torch.randn(*shape, generator=rng), "labels": tokens(rng, 8)}

    return batch


def _series(rng: Rng) -> dict[str, Any]:
    past, future = 12, 4
    return {
        "past_values": torch.randn(2, past, generator=rng),
        "past_time_features": torch.randn(2, past, 1, generator=rng),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future, generator=rng),
        "future_time_features": torch.randn(2, future, 1, generator=rng),
    }


def _patches(rng: Rng) -> dict[str, Any]:
    return {"past_values": torch.randn(2, 32, 2, generator=rng), "future_values": torch.randn(2, 8, 2, generator=rng)}


def _waveform(rng: Rng) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 1, 320, generator=rng)}


def _reconstructed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    found = model(**batch).audio_values
    return (found - batch["input_values"].reshape(found.shape)[..., : found.shape[-1]]).square().mean()


def _decisions(rng: Rng) -> dict[str, Any]:
    rows, steps = 2, 5
    return {
        "states": torch.randn(rows, steps, 6, generator=rng),
        "actions": torch.randn(rows, steps, 3, generator=rng),
        "rewards": torch.randn(rows, steps, 1, generator=rng),
        "returns_to_go": torch.randn(rows, steps, 1, generator=rng),
        "timesteps": torch.arange(steps).repeat(rows, 1),
        "attention_mask": torch.ones(rows, steps, dtype=torch.long),
    }


def _actions(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(**batch).action_preds - batch["actions"]).square().mean()


_TWO_STACKS = dict(
    vocab_size=VOCAB,
    d_model=HIDDEN,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    dropout=0.1,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
)

SIGNALS: dict[str, Family] = {
    "whisper": hf(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _mel(8, 32, last=False),
        **_TWO_STACKS,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    ),
    "speech-to-text": hf(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        _mel(8, 32),
        **_TWO_STACKS,
        num_conv_layers=1,
        conv_kernel_sizes=(5,),
        conv_channels=32,
        input_feat_per_channel=8,
        max_source_positions=64,
        max_target_positions=16,
    ),
    "moonshine": hf(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        lambda rng: {"input_values": torch.randn(2, 1200, generator=rng), "labels": tokens(rng, 6)},
        vocab_size=VOCAB,
        **{k: v for k, v in _SIZES.items() if k in ("hidden_size", "intermediate_size")},
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "wav2vec2": hf("Wav2Vec2ForCTC", "Wav2Vec2Config", _wave, **_WAVE),
    "wav2vec2-stable": hf(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", _wave, **_WAVE, do_stable_layer_norm=True, feat_extract_norm="layer"
    ),
    "wav2vec2-conformer": hf(
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        _wave,
        **_WAVE,
        conv_depthwise_kernel_size=3,
        position_embeddings_type="relative",
    ),
    "wav2vec2-bert": hf(
        "Wav2Vec2BertForCTC",
        "Wav2Vec2BertConfig",
        _mel(8, 16),
        **{**_WAVE, "layerdrop": 0.0},
        feature_projection_input_dim=8,
        conv_depthwise_kernel_size=3,
        left_max_position_embeddings=4,
        right_max_position_embeddings=4,
    ),
    "hubert": hf("HubertForCTC", "HubertConfig", _wave, **_WAVE),
    "wavlm": hf("WavLMForCTC", "WavLMConfig", _wave, **_WAVE, num_buckets=8, max_bucket_distance=16),
    "sew": hf("SEWForCTC", "SEWConfig", _wave, **_WAVE, squeeze_factor=2),
    "speecht5": hf(
        "SpeechT5ForTextToSpeech",
        "SpeechT5Config",
        _spoken,
        **{k: v for k, v in _TWO_STACKS.items() if k != "d_model"},
        hidden_size=HIDDEN,
        num_mel_bins=8,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speaker_embedding_dim=8,
        reduction_factor=2,
        max_text_positions=32,
        max_speech_positions=32,
    ),
    "audio-spectrogram": hf(
        "ASTForAudioClassification",
        "ASTConfig",
        lambda rng: {"input_values": torch.randn(2, 16, 16, generator=rng), "labels": torch.tensor([0, 1])},
        **_SIZES,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=16,
        num_mel_bins=16,
        num_labels=2,
    ),
    "encodec": hf(
        "EncodecModel",
        "EncodecConfig",
        _waveform,
        loss=_reconstructed,
        hidden_size=16,
        num_filters=4,
        num_residual_layers=1,
        upsampling_ratios=[4, 2],
        codebook_size=16,
        codebook_dim=16,
        num_lstm_layers=1,
        target_bandwidths=[64.0],
        sampling_rate=16000,
    ),
    "dac": hf(
        "DacModel",
        "DacConfig",
        _waveform,
        loss=_reconstructed,
        encoder_hidden_size=4,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=16,
        n_codebooks=2,
        codebook_size=16,
        codebook_dim=4,
        hidden_size=16,
    ),
    "time-series": hf(
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        _series,
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2, 4],
        num_time_features=1,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "autoformer": hf(
        "AutoformerForPrediction",
        "AutoformerConfig",
        _series,
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2, 4],
        num_time_features=1,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        label_length=2,
        moving_average=3,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "informer": hf(
        "InformerForPrediction",
        "InformerConfig",
        _series,
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2, 4],
        num_time_features=1,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "patchtst": hf(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        _patches,
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        ffn_dim=24,
        prediction_length=8,
    ),
    "decision": hf(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        _decisions,
        loss=_actions,
        state_dim=6,
        act_dim=3,
        hidden_size=HIDDEN,
        max_ep_len=16,
        n_layer=3,
        n_head=4,
    ),
}
