"""Vision models of transformers, and models of text and images."""

from typing import Any

import torch
import zoo
from kinds.families import HIDDEN, LABELS, VOCAB, Family, Rng, classified, first_output_squared, hf, images, tokens
from kinds.text import _of_zoo

_VIT: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=16,
    patch_size=4,
    num_labels=LABELS,
    hidden_dropout_prob=0.1,
)


def _boxes(rng: Rng) -> dict[str, Any]:
    labels = [
        {
            "class_labels": torch.randint(0, LABELS, (2,), generator=rng),
            "boxes": torch.rand(2, 4, generator=rng) * 0.4 + 0.1,
        }
        for _ in range(2)
    ]
    return {**images(32)(rng), "labels": labels}


def _masks(rng: Rng) -> dict[str, Any]:
    return {
        **images(32)(rng),
        "mask_labels": [torch.randint(0, 2, (2, 32, 32), generator=rng).float() for _ in range(2)],
        "class_labels": [torch.tensor([0, 1]) for _ in range(2)],
    }


def _segments(rng: Rng) -> dict[str, Any]:
    return {**images(32)(rng), "labels": torch.randint(0, LABELS, (2, 32, 32), generator=rng)}


def _points(rng: Rng) -> dict[str, Any]:
    return {**images(16)(rng), "input_points": torch.rand(2, 1, 1, 2, generator=rng) * 16}


def _video(rng: Rng) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 2, 3, 16, 16, generator=rng),
        "labels": torch.randint(0, LABELS, (2,), generator=rng),
    }


def _masked_patches(rng: Rng) -> dict[str, Any]:
    return {**images()(rng), "noise": torch.rand(2, 16, generator=rng)}


_RESNET_BACKBONE = dict(
    model_type="resnet",
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
    out_features=["stage1", "stage2"],
)
_DETR = dict(
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone=None,
    d_model=HIDDEN,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    num_queries=4,
    num_labels=LABELS,
)

VISION: dict[str, Family] = {
    "vit": hf("ViTForImageClassification", "ViTConfig", classified(), **_VIT),
    "deit": hf("DeiTForImageClassification", "DeiTConfig", classified(), **_VIT),
    "beit": hf(
        "BeitForImageClassification",
        "BeitConfig",
        classified(),
        **_VIT,
        drop_path_rate=0.1,
        use_relative_position_bias=True,
    ),
    "dinov2": hf("Dinov2ForImageClassification", "Dinov2Config", classified(), **_VIT, drop_path_rate=0.1),
    "dinov3": hf(
        "DINOv3ViTModel", "DINOv3ViTConfig", images(), loss=first_output_squared, **_VIT, num_register_tokens=2
    ),
    "vit-mae": hf(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        _masked_patches,
        **_VIT,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
    ),
    "swin": hf(
        "SwinForImageClassification",
        "SwinConfig",
        classified(32),
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=LABELS,
        drop_path_rate=0.1,
    ),
    "convnext": hf(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        classified(32),
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_stages=2,
        num_labels=LABELS,
        drop_path_rate=0.1,
    ),
    "resnet": hf(
        "ResNetForImageClassification",
        "ResNetConfig",
        classified(32),
        embedding_size=8,
        hidden_sizes=[8, 16, 16],
        depths=[2, 2, 1],
        layer_type="basic",
        num_labels=LABELS,
    ),
    "regnet": hf(
        "RegNetForImageClassification",
        "RegNetConfig",
        classified(32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        groups_width=4,
        num_labels=LABELS,
    ),
    "mobilenet-v2": hf(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        classified(32),
        depth_multiplier=0.25,
        min_depth=4,
        last_hidden_size=16,
        num_labels=LABELS,
    ),
    "efficientnet": hf(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        classified(32),
        width_coefficient=0.1,
        depth_coefficient=0.3,
        hidden_dim=128,
        num_labels=LABELS,
        depth_divisor=4,
    ),
    "levit": hf(
        "LevitForImageClassification",
        "LevitConfig",
        classified(64),
        image_size=64,
        patch_size=16,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=LABELS,
        down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    ),
    "hiera": hf(
        "HieraForImageClassification",
        "HieraConfig",
        classified(32),
        image_size=[32, 32],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        num_query_pool=1,
        patch_stride=[4, 4],
        patch_kernel=[7, 7],
        patch_padding=[3, 3],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        masked_unit_attention=[True, False],
        num_labels=LABELS,
    ),
    "segformer": hf(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _segments,
        hidden_sizes=[8, 8, 16, 16],
        depths=[2, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=LABELS,
    ),
    "dpt": hf(
        "DPTForDepthEstimation",
        "DPTConfig",
        images(),
        loss=first_output_squared,
        **_VIT,
        backbone_out_indices=[0, 1, 2],
        neck_hidden_sizes=[8, 8, 8],
        reassemble_factors=[2, 1, 0.5],
        fusion_hidden_size=8,
        is_hybrid=False,
    ),
    "yolos": hf(
        "YolosForObjectDetection", "YolosConfig", _boxes, **{**_VIT, "image_size": [32, 32]}, num_detection_tokens=4
    ),
    "detr": hf("DetrForObjectDetection", "DetrConfig", _boxes, **_DETR, backbone_config=_RESNET_BACKBONE),
    "deformable-detr": hf(
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        _boxes,
        **_DETR,
        num_feature_levels=2,
        backbone_config=_RESNET_BACKBONE,
    ),
    "mask2former": hf(
        "Mask2FormerForUniversalSegmentation",
        "Mask2FormerConfig",
        _masks,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=24,
        encoder_layers=2,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=24,
        num_queries=4,
        train_num_points=32,
        num_labels=LABELS,
        backbone_config=dict(
            model_type="swin",
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
    ),
    "maskformer": hf(
        "MaskFormerForInstanceSegmentation",
        "MaskFormerConfig",
        _masks,
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=LABELS,
        backbone_config=dict(
            model_type="swin",
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        decoder_config=dict(
            model_type="detr",
            d_model=16,
            decoder_layers=2,
            decoder_attention_heads=2,
            decoder_ffn_dim=24,
            num_queries=4,
            encoder_layers=0,
        ),
    ),
    "sam": hf(
        "SamModel",
        "SamConfig",
        _points,
        loss=lambda model, batch: model(**batch).pred_masks.square().mean(),
        vision_config=dict(
            hidden_size=16,
            output_channels=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
            window_size=2,
            global_attn_indexes=[1],
            mlp_dim=24,
            num_pos_feats=8,
        ),
        prompt_encoder_config=dict(hidden_size=16, image_size=16, patch_size=4, mask_input_channels=4),
        mask_decoder_config=dict(
            hidden_size=16, mlp_dim=24, num_hidden_layers=2, num_attention_heads=2, iou_head_hidden_dim=16
        ),
    ),
    "videomae": hf("VideoMAEForVideoClassification", "VideoMAEConfig", _video, **_VIT, num_frames=2, tubelet_size=1),
    "imagegpt": hf(
        "ImageGPTForCausalImageModeling",
        "ImageGPTConfig",
        lambda rng: {"input_ids": (t := tokens(rng)), "labels": t.clone()},
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=3,
        n_head=4,
        n_positions=64,
    ),
}


# Text and images.

_TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
_SIGHT = dict(
    hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
)
_IMAGE = 93
_LLAMA = dict(model_type="llama", **_TEXT, num_key_value_heads=2, pad_token_id=0, use_cache=False)


def _pairs(rng: Rng) -> dict[str, Any]:
    return {"input_ids": tokens(rng, 8), **images()(rng), "return_loss": True}


def _pairs_without_flag(rng: Rng) -> dict[str, Any]:
    return {k: v for k, v in _pairs(rng).items() if k != "return_loss"}


def _captions(rng: Rng) -> dict[str, Any]:
    input_ids = tokens(rng, 8)
    return {"input_ids": input_ids, **images()(rng), "labels": input_ids.clone()}


def _embedded(count: int, size: int = 16, **extra: Any) -> Any:
    """Image tokens among the text's."""

    def batch(rng: Rng) -> dict[str, Any]:
        input_ids = tokens(rng).clamp(max=_IMAGE - 1)
        input_ids[:, 1 : 1 + count] = _IMAGE
        return {
            "input_ids": input_ids,
            **images(size)(rng),
            "labels": input_ids.where(input_ids != _IMAGE, -100),
            **extra,
        }

    return batch


def _of_five_dimensions(batch: Any) -> Any:
    def made(rng: Rng) -> dict[str, Any]:
        found = batch(rng)
        return {**found, "pixel_values": found["pixel_values"].unsqueeze(1)}

    return made


def _paligemma(rng: Rng) -> dict[str, Any]:
    batch = _embedded(4)(rng)
    types = torch.zeros_like(batch["input_ids"])
    types[:, 8:] = 1  # what is generated
    return {**batch, "token_type_ids": types}


def _idefics(rng: Rng) -> dict[str, Any]:
    input_ids = tokens(rng)
    return {
        "input_ids": input_ids,
        "labels": input_ids.clone(),
        "pixel_values": torch.randn(2, 1, 3, 16, 16, generator=rng),
        "image_attention_mask": torch.ones(2, input_ids.shape[1], 1, dtype=torch.long),
        "attention_mask": torch.ones_like(input_ids),
    }


def _answers(rng: Rng) -> dict[str, Any]:
    return {"input_ids": tokens(rng, 8), **images()(rng), "labels": torch.rand(2, LABELS, generator=rng)}


def _written(rng: Rng) -> dict[str, Any]:
    return {**images()(rng), "labels": tokens(rng, 8)}


def _vision_encoder_decoder() -> torch.nn.Module:
    import transformers

    vision = transformers.ViTConfig(**{k: v for k, v in _VIT.items() if k != "num_labels"})
    text = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.VisionEncoderDecoderModel(config)


MULTIMODAL: dict[str, Family] = {
    **{name: _of_zoo(name) for name in zoo.NAMES if name.startswith(("qwen2.5-vl", "qwen3-vl", "llava"))},
    "clip": hf(
        "CLIPModel",
        "CLIPConfig",
        _pairs,
        text_config=dict(_TEXT, eos_token_id=2),
        vision_config=_SIGHT,
        projection_dim=16,
    ),
    "siglip": hf("SiglipModel", "SiglipConfig", _pairs, text_config=_TEXT, vision_config=_SIGHT),
    "clipseg": hf(
        "CLIPSegForImageSegmentation",
        "CLIPSegConfig",
        lambda rng: {**_pairs_without_flag(rng), "labels": torch.rand(2, 16, 16, generator=rng)},
        text_config=dict(_TEXT, eos_token_id=2),
        vision_config=_SIGHT,
        projection_dim=16,
        extract_layers=[0, 1],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
    ),
    "groupvit": hf(
        "GroupViTModel",
        "GroupViTConfig",
        _pairs,
        text_config=dict(_TEXT, eos_token_id=2),
        vision_config=dict(
            _SIGHT, depths=[1, 1, 1], num_group_tokens=[4, 2, 0], num_output_groups=[4, 2, 2], num_hidden_layers=3
        ),
        projection_dim=16,
        projection_intermediate_dim=16,
    ),
    "blip": hf(
        "BlipForConditionalGeneration",
        "BlipConfig",
        _captions,
        text_config=dict(_TEXT, encoder_hidden_size=HIDDEN, bos_token_id=1, pad_token_id=0),
        vision_config=_SIGHT,
        projection_dim=16,
    ),
    "blip-2": hf(
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        _embedded(3),
        vision_config=_SIGHT,
        qformer_config=dict(_TEXT, encoder_hidden_size=HIDDEN, cross_attention_frequency=2),
        text_config=dict(model_type="opt", **_TEXT, ffn_dim=48, word_embed_proj_dim=HIDDEN),
        num_query_tokens=3,
        image_token_index=_IMAGE,
    ),
    "qwen2-vl": hf(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        lambda rng: zoo.batch("qwen2.5-vl", seed=rng.initial_seed()),
        text_config={**zoo._TEXT, "rope_parameters": zoo._MROPE},
        vision_config=dict(depth=3, embed_dim=16, hidden_size=HIDDEN, num_heads=2, patch_size=4, mlp_ratio=2),
        **zoo._SPECIAL,
    ),
    "paligemma": hf(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        _paligemma,
        vision_config=dict(model_type="siglip_vision_model", **_SIGHT),
        text_config=dict(model_type="gemma", **_TEXT, num_key_value_heads=2, head_dim=8, pad_token_id=0),
        image_token_index=_IMAGE,
        projection_dim=HIDDEN,
    ),
    "idefics": hf(
        "IdeficsForVisionText2Text",
        "IdeficsConfig",
        _idefics,
        **{**_TEXT, "num_hidden_layers": 4},
        additional_vocab_size=0,
        cross_layer_interval=2,
        qk_layer_norms=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        vision_config=dict(
            embed_dim=HIDDEN,
            image_size=16,
            patch_size=8,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
        ),
        perceiver_config=dict(use_resampler=False),
    ),
    "idefics3": hf(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        _of_five_dimensions(_embedded(1)),
        vision_config=_SIGHT,
        text_config=_LLAMA,
        scale_factor=2,
        image_token_id=_IMAGE,
    ),
    "mllama": hf(
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        lambda rng: {
            "input_ids": (t := tokens(rng).clamp(max=_IMAGE - 1)),
            "labels": t.clone(),
            "pixel_values": torch.randn(2, 1, 1, 3, 16, 16, generator=rng),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 12, 1, 1, dtype=torch.long),
        },
        vision_config=dict(
            hidden_size=HIDDEN,
            attention_heads=4,
            num_hidden_layers=2,
            num_global_layers=1,
            intermediate_size=48,
            image_size=16,
            patch_size=8,
            max_num_tiles=1,
            intermediate_layers_indices=[0, 1],
            vision_output_dim=3 * HIDDEN,
            supported_aspect_ratios=[[1, 1]],
        ),
        text_config=dict(
            _TEXT,
            num_hidden_layers=4,
            num_key_value_heads=2,
            cross_attention_layers=[1, 3],
            pad_token_id=0,
            use_cache=False,
        ),
        image_token_index=_IMAGE,
    ),
    "gemma3-vl": hf(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        lambda rng: {**(b := _embedded(4)(rng)), "token_type_ids": (b["input_ids"] == _IMAGE).long()},
        vision_config=_SIGHT,
        text_config=dict(
            _TEXT, num_hidden_layers=3, num_key_value_heads=2, head_dim=8, sliding_window=4, use_cache=False
        ),
        mm_tokens_per_image=4,
        image_token_index=_IMAGE,
    ),
    "flava": hf(
        "FlavaModel",
        "FlavaConfig",
        _pairs_without_flag,
        loss=lambda model, batch: model(**batch).multimodal_embeddings.square().mean(),
        text_config=_TEXT,
        image_config=_SIGHT,
        multimodal_config=dict(hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
        hidden_size=HIDDEN,
        projection_dim=16,
    ),
    "vilt": hf(
        "ViltForQuestionAnswering",
        "ViltConfig",
        _answers,
        **_TEXT,
        image_size=16,
        patch_size=8,
        num_labels=LABELS,
        max_image_length=-1,
    ),
    "git": hf(
        "GitForCausalLM",
        "GitConfig",
        _captions,
        vision_config=_SIGHT,
        **{**_TEXT, "num_hidden_layers": 3},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "kosmos-2": hf(
        "Kosmos2ForConditionalGeneration",
        "Kosmos2Config",
        lambda rng: {
            "input_ids": (t := tokens(rng)),
            "labels": t.clone(),
            **images()(rng),
            "image_embeds_position_mask": torch.tensor([[0, 1, 1] + [0] * 9] * 2),
        },
        vision_config=_SIGHT,
        latent_query_num=2,
        text_config=dict(
            vocab_size=VOCAB,
            embed_dim=HIDDEN,
            layers=2,
            ffn_dim=48,
            attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
        ),
    ),
    "vision-encoder-decoder": Family(build=_vision_encoder_decoder, batch=_written),
}
