"""Models of diffusers, and of timm."""

from typing import Any

import timm_models
import torch
from kinds.families import Family, Rng, first_output_squared
from torch import Tensor, nn


def _diffusers(name: str, batch: Any, loss: Any = None, **settings: Any) -> Family:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**settings)

    return Family(build=build, batch=batch, loss=loss or first_output_squared)


def _with(**shapes: tuple[int, ...]) -> Any:
    """Noise of these shapes, beside the time step of each row."""

    def batch(rng: Rng) -> dict[str, Any]:
        rows = next(iter(shapes.values()))[0]
        return {
            **{name: torch.randn(*shape, generator=rng) for name, shape in shapes.items()},
            "timestep": torch.randint(0, 100, (rows,), generator=rng),
        }

    return batch


def _labelled(rng: Rng) -> dict[str, Any]:
    return {**_with(hidden_states=(2, 4, 8, 8))(rng), "class_labels": torch.randint(0, 3, (2,), generator=rng)}


def _flux(rng: Rng) -> dict[str, Any]:
    return {
        **_with(hidden_states=(2, 16, 4), encoder_hidden_states=(2, 6, 32), pooled_projections=(2, 16))(rng),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
        "guidance": torch.ones(2),
    }


def _lumina(rng: Rng) -> dict[str, Any]:
    return {
        **_with(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 32))(rng),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool),
    }


def _reconstructed(model: nn.Module, batch: Any) -> Tensor:
    return (model(**batch, sample_posterior=True).sample - batch["sample"]).square().mean()


def _ltx(rng: Rng) -> dict[str, Any]:
    mask = torch.ones(2, 6)
    return {
        **_with(hidden_states=(2, 16, 4), encoder_hidden_states=(2, 6, 16))(rng),
        "encoder_attention_mask": mask,
        "num_frames": 1,
        "height": 4,
        "width": 4,
    }


def _sdxl(rng: Rng) -> dict[str, Any]:
    extra = {"text_embeds": torch.randn(2, 8, generator=rng), "time_ids": torch.randn(2, 6, generator=rng)}
    return {**_with(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16))(rng), "added_cond_kwargs": extra}


_UNET = dict(sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4)
_ATTENDING = dict(_UNET, in_channels=4, out_channels=4, cross_attention_dim=16, attention_head_dim=4)
_DIT = dict(num_attention_heads=2, attention_head_dim=16, num_layers=3)

DIFFUSERS: dict[str, Family] = {
    "unet-condition": _diffusers(
        "UNet2DConditionModel",
        _with(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16)),
        **_ATTENDING,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "sdxl": _diffusers(
        "UNet2DConditionModel",
        _sdxl,
        **_ATTENDING,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
        use_linear_projection=True,
    ),
    "unet": _diffusers(
        "UNet2DModel",
        _with(sample=(2, 3, 8, 8)),
        **_UNET,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ),
    "unet-3d": _diffusers(
        "UNet3DConditionModel",
        _with(sample=(2, 4, 2, 8, 8), encoder_hidden_states=(2, 6, 16)),
        **_ATTENDING,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    "controlnet": _diffusers(
        "ControlNetModel",
        _with(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16), controlnet_cond=(2, 3, 64, 64)),
        loss=lambda model, batch: sum(t.square().mean() + t.mean() for t in model(**batch).down_block_res_samples),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        in_channels=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(4, 8, 8, 8),
    ),
    "dit": _diffusers(
        "DiTTransformer2DModel",
        _labelled,
        **_DIT,
        in_channels=4,
        out_channels=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=100,
        norm_num_groups=4,
    ),
    "pixart": _diffusers(
        "PixArtTransformer2DModel",
        _with(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16)),
        **_DIT,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=32,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    "flux": _diffusers(
        "FluxTransformer2DModel",
        _flux,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ),
    "sd3": _diffusers(
        "SD3Transformer2DModel",
        _with(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 32), pooled_projections=(2, 16)),
        **_DIT,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
    ),
    "sana": _diffusers(
        "SanaTransformer2DModel",
        _with(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 16)),
        **_DIT,
        in_channels=4,
        out_channels=4,
        sample_size=8,
        patch_size=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
    ),
    "cogvideox": _diffusers(
        "CogVideoXTransformer3DModel",
        _with(hidden_states=(2, 2, 4, 8, 8), encoder_hidden_states=(2, 6, 16)),
        **_DIT,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=6,
    ),
    "wan": _diffusers(
        "WanTransformer3DModel",
        _with(hidden_states=(2, 4, 2, 8, 8), encoder_hidden_states=(2, 6, 16)),
        **_DIT,
        patch_size=(1, 2, 2),
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=48,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ),
    "vae": _diffusers(
        "AutoencoderKL",
        lambda rng: {"sample": torch.randn(2, 3, 16, 16, generator=rng)},
        loss=_reconstructed,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "vq": _diffusers(
        "VQModel",
        lambda rng: {"sample": torch.randn(2, 3, 16, 16, generator=rng)},
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=16,
        latent_channels=4,
    ),
}


def _timm(name: str, size: int = 32, **settings: Any) -> Family:
    return Family(
        build=lambda: timm_models.create(name, **settings),
        batch=timm_models.batch(size),
        loss=timm_models.cross_entropy,
        needs_timm=True,
    )


_VIT = dict(img_size=32, patch_size=8, embed_dim=16, depth=4, num_heads=2)
TIMM: dict[str, Family] = {
    "timm-vit": _timm("vit_tiny_patch16_224", **_VIT),
    "timm-convnext": _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), drop_path_rate=0.1),
    "timm-swin": _timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        patch_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
    ),
    "timm-efficientnet": _timm("test_efficientnet"),
    "timm-mixer": _timm("gmixer_12_224", img_size=32),
    "timm-resnet": _timm("resnet18", channels=(8, 8, 16, 16)),
}
