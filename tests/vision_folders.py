"""Small vision-language models on disk for whole runs: weights, processor, and conversations with images.

Their tokenizer has one token per letter, so that the tokens of a text can be written down by hand.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

SPECIAL = [
    "</s>", "<pad>", "<s>", "<image>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", *(f"<row_{row}_col_{column}>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)),
]  # fmt: skip
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(SPECIAL) + len(LETTERS)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As the model's authors wrote it: content in parts only, the answer marked."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}IMAGE"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
"""As Qwen2-VL's: text or parts, the answer unmarked."""
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=2, eos_token_id=0, pad_token_id=1,
)  # fmt: skip
_CLIP: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
)


class QwenImages(transformers.Qwen2VLProcessor):
    """Qwen2-VL's processor without videos, which need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(
            tokenizer.convert_tokens_to_ids, ("<|image_pad|>", "<|video_pad|>")
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class _QwenImagesConfig(transformers.PretrainedConfig):
    model_type = "qwen-images-of-tests"


transformers.AutoProcessor.register(_QwenImagesConfig, QwenImages, exist_ok=True)


def tokenizer_of(**settings: Any) -> Any:
    inner = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*SPECIAL, *LETTERS])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", **settings)
    made.add_tokens(SPECIAL, special_tokens=True)
    return made


def processor_of(kind: str) -> Any:
    if kind == "llava":  # 16 tokens an image
        return transformers.LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
            tokenizer_of(),
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=LLAVA,
        )
    if kind == "qwen":  # one token for 8 x 8 pixels
        return QwenImages(
            Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096),
            tokenizer_of(),
            chat_template=QWEN,
        )
    if kind == "idefics3":  # tiles of 16 x 16 pixels, 4 tokens each, if an image is larger than one
        return transformers.Idefics3Processor(
            Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
            tokenizer_of(),
            image_seq_len=4,
            chat_template=CHATML.replace("IMAGE", "<image>"),
        )
    if kind == "mllama":  # one token an image
        tokenizer = tokenizer_of(bos_token="<s>")
        tokenizer.add_tokens(["<|image|>"], special_tokens=True)
        return transformers.MllamaProcessor(
            MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=2),
            tokenizer,
            chat_template="{{ bos_token }}" + CHATML.replace("IMAGE", "<|image|>"),
        )
    tokens = {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        tokenizer_of(bos_token="<s>", extra_special_tokens=tokens),
        image_seq_length=4,
        chat_template="{{ bos_token }}" + CHATML.replace("IMAGE", "<start_of_image>"),
    )


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "llava":
        config: Any = transformers.LlavaConfig(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config={**_CLIP, "model_type": "clip_vision_model"},
            image_token_index=SPECIAL.index("<image>"),
        )
        return transformers.LlavaForConditionalGeneration(config)
    if kind == "qwen":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4)
        places = {f"{name}_token_id": SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end")}
        config = transformers.Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=SPECIAL.index("<|image_pad|>"),
            video_token_id=SPECIAL.index("<|video_pad|>"),
            **places,
        )
        return transformers.Qwen2VLForConditionalGeneration(config)
    if kind == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**_TEXT, "model_type": "gemma3_text", "head_dim": 8},
            vision_config={**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_id=SPECIAL.index("<image>"),
            boi_token_id=SPECIAL.index("<start_of_image>"),
            eoi_token_id=SPECIAL.index("<end_of_image>"),
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    config = transformers.Idefics3Config(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_CLIP, "model_type": "idefics3_vision"},
        image_token_id=SPECIAL.index("<image>"),
        scale_factor=2,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "ran", "far", "away"]


def write_chats(folder: Path, count: int = 12, name: str = "data.jsonl") -> Path:
    """Rows with 0, 1 and 2 images, as parts and as `<image>` with a column, of several sizes."""
    rows: list[dict[str, Any]] = []
    for n in range(count):
        files = [f"{n}-{m}.png" for m in range(n % 3)]
        for m, file in enumerate(files):
            picture(16 + 8 * ((n + m) % 3), 16 + 8 * (n % 2), seed=7 * n + m).save(folder / file)
        text, answer = " ".join(WORDS[: 2 + n % 5]), " ".join(WORDS[n % 7 : n % 7 + 3])
        if n % 2:
            content: Any = [*({"type": "image", "path": file} for file in files), {"type": "text", "text": text}]
        else:
            content = "<image>\n" * len(files) + text
        row = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        rows.append({"messages": row, **({} if n % 2 else {"images": files})})
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(folder: Path, kind: str = "llava", **keys: Any) -> Path:
    """A model, its processor, data and run.yaml below `folder`; returns the YAML."""
    model = folder / "model"
    if not model.exists():
        model_of(kind).to(torch.bfloat16).save_pretrained(model)
        processor_of(kind).save_pretrained(model)
    settings = {
        "base_model": str(model), "datasets": [{"path": str(write_chats(folder)), "type": "chat_template"}],
        "sequence_len": 256, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "learning_rate": 1e-2, "weight_decay": 0.1, "output_dir": str(folder / "out"), "device": "cpu",
        "chunk_bytes": "8KiB",
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**settings, **keys}, sort_keys=False))
    return path
