"""The table of keys that other tools have and RunConfig has not, or means otherwise: renamed, converted, ignored or
refused. docs/axolotl.md is generated from it (tools/axolotl_table.py).

A key without a value, or whose value is false, zero or empty, is off. A key of the table that is off is ignored
silently.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from outsize.config import convert
from outsize.config.convert import Convert


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherKey:
    action: Literal["renamed", "converted", "ignored", "refused"]
    text: str
    """Renamed: our name. Converted: into what. Ignored: why it has no effect. Refused: what is wrong and what to do."""
    convert: Convert | None = None


def renamed(name: str, keys: str) -> dict[str, OtherKey]:
    return dict.fromkeys(keys.split(), OtherKey(action="renamed", text=name))


def converted(function: Convert, text: str, keys: str) -> dict[str, OtherKey]:
    return dict.fromkeys(keys.split(), OtherKey(action="converted", text=text, convert=function))


def ignored(why: str, keys: str) -> dict[str, OtherKey]:
    return dict.fromkeys(keys.split(), OtherKey(action="ignored", text=why))


def refused(what: str, keys: str) -> dict[str, OtherKey]:
    return dict.fromkeys(keys.split(), OtherKey(action="refused", text=what))


_TO_EXPORTED = "Train without it, and apply it to the exported model."
_OWN_LOOP = "Train with OutsizeTrainer, or remove it."
_ONE_GPU = "A run uses one GPU. Remove it: weights that do not fit the GPU are streamed from host memory."
_FIXED = "Model and tokenizer are used as they are saved. Change them once with transformers and save the folder."

SHARED: dict[str, OtherKey] = {
    **renamed("base_model", "model_name_or_path"),
    **renamed("sequence_len", "max_seq_length max_length cutoff_len"),
    **renamed("sample_packing", "packing"),
    **renamed("num_epochs", "num_train_epochs"),
    **renamed("learning_rate", "lr"),
    **renamed("micro_batch_size", "per_device_train_batch_size"),
    **renamed("eval_batch_size", "per_device_eval_batch_size"),
    **renamed("lr_scheduler", "lr_scheduler_type"),
    **renamed("optimizer", "optim"),
    **renamed("peft_use_dora", "use_dora"),
    **renamed("eval_strategy", "evaluation_strategy"),
    **converted(
        convert.optimizer, "8-bit, 4-bit and paged AdamW and Lion run as the exact optimizer; a note says what memory "
        "its state takes", "optimizer",
    ),
    **converted(convert.optimizer_arguments, "a mapping is written as `name=value,name=value`", "optim_args"),
    **converted(convert.adapter, "`qlora` is `lora` with `load_in_4bit`, which it needs", "adapter"),
    **converted(
        convert.target_modules, "a string with more than a name is a regex; `all-linear` is `lora_target_linear`",
        "lora_target_modules",
    ),
    **converted(
        convert.attention, "as in transformers; `xformers` is `sdpa`. Without its package, a flash implementation is "
        "replaced by `sdpa`, with a note", "attn_implementation",
    ),
    **converted(convert.half_precision, "`bf16: true`, also beside `bf16: false`", "fp16 float16"),
    **converted(convert.quant_storage, "packed 4-bit weights are stored as uint8; the bytes are the same in any dtype",
                "bnb_4bit_quant_storage"),
    **ignored("8-bit weights are dequantized: activations are not quantized, and there are no outliers",
              "llm_int8_threshold llm_int8_has_fp16_weight llm_int8_enable_fp32_cpu_offload"),
    **converted(convert.dtype, "`bf16: true`, or `false` for float32", "torch_dtype dtype"),
    **ignored(
        "the plan decides per block what is recomputed (`plan: {n_checkpoint: 3}` fixes how many)",
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing",
    ),
    **ignored("layers run uncompiled, because the plan's actions run between them", "torch_compile torch_compile_*"),
    **ignored("a run uses one GPU", "local_rank ddp ddp_* device_map"),
    **ignored("all columns that are not used are left out", "remove_unused_columns"),
    **ignored("batches are pinned and prefetched anyway", "dataloader_pin_memory dataloader_prefetch_factor"),
    **ignored("the whole data is used", "dataloader_drop_last"),
    **ignored("rows keep their random order; lengths change speed only", "group_by_length"),
    **ignored("checkpoints are always safetensors", "save_safetensors"),
    **ignored("a lower evaluation loss is better", "greater_is_better"),
    **ignored("host memory holds the weights once", "low_cpu_mem_usage"),
    **ignored("transformers has the model's class; code of model folders is not run", "trust_remote_code"),
    **ignored("its default is used", "accelerator_config hub_strategy torch_empty_cache_steps"),
    **ignored("the log has loss, learning rate, gradient norm and tokens/s", "include_tokens_per_second debug"),
    **refused("The plan decides where weights and state are. Remove it; gpu_memory and host_memory set the budgets.",
              "deepspeed fsdp fsdp_config"),
    **refused("Memory is planned before the first step. Give batch_size alone: outsize chooses the micro-batch.",
              "auto_find_batch_size"),
    **refused("Noise on embeddings is not supported. Remove it.", "neftune_noise_alpha noisy_embedding_alpha"),
}  # fmt: skip
"""Keys that are not Axolotl's alone."""

AXOLOTL: dict[str, OtherKey] = {
    # Precision and attention
    **renamed("bf16", "bfloat16"),
    **renamed("adam_epsilon", "adam_eps"),
    **converted(lambda *_: convert.Converted(keys={"bf16": False}), "`bf16: false`", "float32"),
    **converted(convert.bitsandbytes_settings, "its keys `bnb_4bit_quant_type`, `bnb_4bit_use_double_quant`, "
                "`bnb_4bit_compute_dtype` and `llm_int8_skip_modules` are settings", "bnb_config_kwargs"),
    **converted(
        convert.attention, "`attn_implementation`: `flash_attention_2`, `sdpa` (also for xformers), `flex_attention`, "
        "`eager`", "flash_attention sdp_attention xformers_attention flex_attention eager_attention",
    ),
    **refused("Its attention is approximate. Use attn_implementation: sdpa.", "sage_attention s2_attention"),
    # Length and saving
    **converted(convert.per_epoch, "`save_steps`: the share 1 / (saves_per_epoch × num_epochs) of all steps",
                "saves_per_epoch"),
    **converted(convert.per_epoch, "`eval_steps`: the share 1 / (evals_per_epoch × num_epochs) of all steps",
                "evals_per_epoch"),
    **converted(convert.curriculum, "`train_sampling_strategy: sequential`", "curriculum_sampling"),
    # Trackers
    **converted(
        convert.tracker, "`report_to` has the tracker", "use_wandb use_mlflow use_tensorboard use_comet use_trackio "
        "use_swanlab",
    ),
    **converted(
        convert.tracker, "an environment variable of the same name in capitals; a project or experiment also adds the "
        "tracker to `report_to`; the name of a run is `run_name`", "wandb_* mlflow_* hf_mlflow_log_artifacts comet_* "
        "swanlab_* trackio_*",
    ),
    **ignored("the log has loss, learning rate, gradient norm and tokens/s", "use_otel_metrics otel_* "
              "include_tkps profiler_steps profiler_steps_start"),
    # Data
    **converted(convert.pretraining_dataset, "`datasets` of `type: completion`, read as a whole",
                "pretraining_dataset"),
    **converted(convert.chat_template, "`tokenizer_default` and `jinja` need no setting; a name is kept",
                "chat_template"),
    **converted(convert.tokens, "new tokens; a mapping is `special_tokens`", "tokens"),
    **ignored(
        "rows are tokenized at the start of a run and kept in memory", "dataset_prepared_path skip_prepare_dataset "
        "dataset_processes dataset_num_proc dataset_keep_in_memory num_dataset_shards_to_save preprocess_iterable "
        "is_preprocess push_dataset_to_hub streaming streaming_multipack_buffer_size pretrain_multipack_* "
        "pretraining_sample_concatenation",
    ),
    **ignored("rows are shuffled in every epoch", "shuffle_merged_datasets shuffle_before_merging_datasets"),
    **ignored(
        "packing fills rows best-fit; evaluation data is packed as training data is", "eval_sample_packing "
        "sample_packing_* multipack_real_batches batch_flattening pad_to_multiple_of total_num_tokens "
        "total_supervised_tokens",
    ),
    **ignored("the loss covers what the chat template renders as the end of an answer", "eot_tokens"),
    **ignored("turns are located in what the chat template renders", "role_boundaries"),
    **refused("Images are resized by image_size, which pads with black. Remove it, or resize the files.",
              "image_resize_buckets image_resize_no_upscale image_resize_pad_color"),
    **refused("sample_packing: true packs rows to sequence_len. Use these.", "max_packed_sequence_len"),
    **refused("The data is used as it is. Filter or extend it beforehand.", "min_sample_len dataset_shard_num "
              "dataset_shard_idx default_system_message chat_template_kwargs use_pose pose_* eval_sequence_len"),
    # Preferences
    **converted(convert.preference_method, "`dpo`; `ipo` is `dpo` with `dpo_loss_type: ipo`; others are refused by "
                "name", "rl"),
    **renamed("rl_beta", "dpo_beta"),
    **converted(convert.trl_settings, "`beta` is `rl_beta`; the others are of methods that are refused", "trl"),
    **ignored("the reference runs in every step, which gives the same values", "precompute_ref_log_probs"),
    **ignored("sequence_len limits prompt and answer together", "max_prompt_len"),
    **ignored("batches are padded, and the loss is computed in chunks", "dpo_padding_free dpo_use_liger_kernel "
              "dpo_use_logits_to_keep"),
    **ignored("evaluation computes the loss", "dpo_generate_during_eval"),
    **refused("TRL has no such loss. Use dpo_loss_type: sigmoid_norm, which is normalized by length.",
              "dpo_norm_loss"),
    **refused("Use dpo_loss_type: [sigmoid, sft] with dpo_loss_weights: [1, <rpo_alpha>].", "rpo_alpha"),
    # Tokenizer and model
    **converted(convert.model_type, "classes of language models are read from the config; others are refused",
                "model_type type_of_model"),
    **ignored(
        "the class is read from the files of the model or tokenizer", "tokenizer_type tokenizer_use_fast "
        "tokenizer_legacy tokenizer_use_mistral_common tokenizer_save_jinja_files "
        "is_*_derived_model base_model_ignore_patterns strict",
    ),
    **ignored("log in with `hf auth login`, or set HF_TOKEN", "hf_use_auth_token"),
    **ignored("tokens that are never used need no rows", "resize_token_embeddings_to_32x shrink_embeddings "
              "mean_resizing_embeddings fix_untrained_tokens embeddings_skip_upcast"),
    **renamed("overrides_of_model_config", "model_config"),
    **renamed("rope_parameters", "rope_scaling"),
    **refused(_FIXED, "base_model_config cls_model_config overrides_of_model_kwargs revision_of_model "
              "added_tokens_overrides"),
    # Memory and kernels
    **converted(convert.gpu_memory_limit, "`gpu_memory`; a number means GiB", "gpu_memory_limit"),
    **ignored("the plan decides what is where", "max_memory lora_on_cpu layer_offloading "
              "selective_checkpointing ple_cpu_offload gc_steps gc_collect_steps "
              "experimental_skip_move_to_device qlora_sharded_model_loading"),
    **ignored("long rows run through MLPs and norms in tiles (tile_tokens)", "tiled_mlp tiled_mlp_*"),
    **ignored(
        "kernels that change speed and memory only; the loss is computed in chunks (chunked_loss)", "liger_* "
        "cut_cross_entropy chunked_cross_entropy chunked_cross_entropy_num_chunks "
        "lora_embedding_kernel flash_attn_* flash_optimum fused_attn_kernel flex_attn_compile_kwargs "
        "unsloth_* use_kernels use_scattermoe use_sonicmoe use_*_kernels experts_implementation expert_backend "
        "moe_* large_head_attention sdpa_varlen gemma4_hybrid_attn_impl heads_k_stride deepcompile",
    ),
    **converted(convert.plugins, "kernels, losses and trackers are ignored, others refused", "plugins"),
    **ignored("only with a key that is refused", "fsdp_* ring_attn_func expert_parallel_* orpo_alpha kto_* "
              "cpo_alpha simpo_gamma vllm ebft num_labels center_rewards_coefficient gptq_* "
              "model_quantization_config_kwargs "
              "llama4_linearized_experts nvfp4_* dsv4_* gemma4_fp8_nonexpert gemma4_nf4_nonexpert "
              "lisa_step_interval lisa_layers_attribute relora_* eaft_* fp8_* ray_* resources_per_worker "
              "kd_ce_alpha kd_top_* kd_online_* kd_normalize_* kd_beta kd_zscore_* kd_always_*"),
    **ignored("evaluation computes the loss", "eval_table_size eval_max_new_tokens eval_causal_lm_metrics "
              "do_causal_lm_eval do_bench_eval bench_dataset bench_split generate_samples num_generation_samples "
              "generation_* gradio_* lm_eval_*"),
    **ignored("`nonfinite` says what a step with a non-finite gradient does", "loss_watchdog_threshold "
              "loss_watchdog_patience"),
    **ignored("Axolotl has no such setting; some of its examples have the key", "eta_min test_value"),
    **ignored("its default is used", "axolotl_config_path torchdistx_path "
              "save_first_step dynamic_checkpoint lora_fan_in_fan_out peft_autocast_adapter_dtype"),
    # Refused
    **refused(_ONE_GPU, "tensor_parallel_size context_parallel_size sequence_parallel_degree expert_parallel_size "
              "dp_shard_size dp_replicate_size world_size use_ray"),
    **refused("Rewards are not part of a YAML run. Use TRL's RewardTrainer with OutsizeMixin in Python "
              "(docs/other-code.md).", "reward_model process_reward_model"),
    **refused("GPTQ weights are not read. Remove it, and use the unquantized model with load_in_4bit.", "gptq"),
    **refused("Linear layers are quantized by load_in_4bit or load_in_8bit, experts in one tensor are not. Remove it.",
              "quantize_moe_experts model_quantization_config nonexpert_quantization"),
    **refused("Weights are bf16 with exact fp32 master weights. " + _TO_EXPORTED, "qat quantization fp8 llmcompressor "
              "use_onebitllms"),
    **refused("It changes the loss or the model. " + _OWN_LOOP, "diffusion use_eaft scaling_softmax scaling_softmax_* "
              "dense_mixer grokfast_alpha grokfast_lamb hatchery nemo_gym_* trainer_cls fp32_norms "
              "fp32_norm_classes"),
    **refused("Distillation takes the teacher's probabilities from the teacher. Set teacher_model, kd_alpha and "
              "kd_temperature.", "kd_trainer"),
    **refused("Which weights are trained is fixed for a run. Use unfrozen_parameters or an adapter.", "lisa_n_layers "
              "relora spectrum_top_fraction spectrum_model_name"),
    **refused("One learning rate holds for all weights. Remove it, and set learning_rate.", "loraplus_lr_ratio "
              "loraplus_lr_embedding embedding_lr embedding_lr_scale lr_groups"),
    **refused("Use lr_scheduler and lr_scheduler_kwargs: cosine_with_min_lr takes {min_lr_rate: 0.1}.",
              "cosine_min_lr_ratio cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor jagged_restart_*"),
    **refused("Adapters are plain LoRA, rsLoRA or DoRA on linear layers. Use lora_target_modules or "
              "lora_target_linear, or pass your own PEFT model to OutsizeTrainer.", "lora_target_parameters peft mora "
              "use_mora lora_rank_pattern lora_alpha_pattern peft_layers_to_transform peft_layers_pattern "
              "peft_layer_replication peft_init_lora_weights peft_trainable_token_indices peft_ensure_weight_tying"),
}  # fmt: skip
"""Keys of Axolotl alone: a file with one of them is taken for Axolotl's."""

TABLE = {**SHARED, **AXOLOTL}
_PATTERNS = sorted((key for key in TABLE if "*" in key), key=len, reverse=True)


def find(key: str) -> OtherKey | None:
    """The row of a key: its own, or that of the longest pattern, such as `wandb_*`, that it matches."""
    if (row := TABLE.get(key)) is not None:
        return row
    return next((TABLE[pattern] for pattern in _PATTERNS if fnmatchcase(key, pattern)), None)


def our_name(key: str) -> str:
    row = TABLE.get(key)
    return row.text if row is not None and row.action == "renamed" else key


def spelling_in(mapping: Mapping[Any, Any], key: str) -> str:
    """How the mapping spells the setting that `key` names; `key` itself if it is absent."""
    return next((str(other) for other in mapping if our_name(str(other)) == our_name(key)), key)


def axolotl_keys(mapping: Mapping[Any, Any]) -> Iterator[str]:
    """The keys that only Axolotl has, on or off."""
    return (key for key in map(str, mapping) if key not in SHARED and find(key) is not None)


def is_off(key: str, value: Any) -> bool:
    return not value or (value == 1 and key.endswith(("_size", "_degree")))
