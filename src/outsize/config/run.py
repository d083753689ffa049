"""RunConfig: the settings of a run. `read.py` makes one from YAML and checks it.

The names are those of Axolotl and transformers. To add a key, add a field with a type (see `types.py`) and a default,
and a row in docs/config.md.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from outsize.base.records import Rule
from outsize.config.prune import PruneConfig
from outsize.config.types import (
    ActivationOffloading,
    Adapter,
    Bf16,
    Checkpoint,
    ComputeDtype,
    Count,
    CountFromZero,
    CountOrShare,
    DatasetType,
    DpoLoss,
    ImageSize,
    NotNegative,
    Optimizer,
    PinName,
    PlanFile,
    Positive,
    PromptKey,
    SaveStrategy,
    Scheduler,
    SdpKernel,
    Seed,
    Share,
    ShareBelowOne,
    ShareOrCount,
    Size,
    SpecialToken,
    TargetModules,
    Text,
    Tf32,
    Trackers,
    Warmup,
)
from outsize.model.strategies import TILE_TOKENS
from outsize.quant.settings import Quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    path: Text
    """A local file or folder, or a hub id. A dataset written as a string is its path."""
    type: DatasetType | None = None
    """How a row becomes tokens. None: decided by the columns."""
    prompt: dict[PromptKey, str] | None = field(default=None, metadata={"key": "type"})
    """The columns and the prompt of an instruction format of one's own."""
    field: Text = "text"
    """The column of a completion."""
    field_messages: Text = "messages"
    """The column of a conversation."""
    field_chosen: Text = "chosen"
    field_rejected: Text = "rejected"
    """The columns of the answers of a preference pair."""
    message_property_mappings: dict[str, Text] | None = None
    """The key in the data per key of a message: `{role: from, content: value}`."""
    message_field_role: Text | None = None
    message_field_content: Text | None = None
    """Axolotl's older form of `message_property_mappings`."""
    roles: dict[str, tuple[Text, ...]] | None = None
    """Other names of roles in the data: `{assistant: [bot]}`."""
    roles_to_train: tuple[Text, ...] = ("assistant",)
    train_on_eos: Literal["all", "turn", "last", "none"] | None = None
    """Which tokens that end turns are trained. None: what a turn's template ends it with."""
    message_field_training: Text | None = None
    """The key of a message that says whether it is trained."""
    field_thinking: Text = "reasoning_content"
    """The key of a message's thoughts in the data."""
    template_thinking_key: Text = "reasoning_content"
    """The key of a message's thoughts in the chat template."""
    drop_system_message: bool = False
    chat_template: Text | None = None
    """A name in data/templates.py. None: the run's."""
    split: Text = "train"
    name: Text | None = None
    """The configuration of a hub dataset that has several."""
    data_files: tuple[Text, ...] = ()
    """Files of a folder or of a hub dataset. Empty: all."""
    ds_type: Literal["json", "jsonl", "text", "csv", "parquet"] | None = None
    """The format of local files. None: decided by their suffix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A field is a key of the same name, unless its metadata has `key`: another name, or none if empty."""

    base_model: Text
    """A local folder or a hub id."""
    overrides_of_model_config: dict[str, Any] | None = None
    """Values of the model's config that replace the saved ones."""
    rope_parameters: dict[str, Any] | None = None
    """Values of the model's rotary embeddings that replace the saved ones, for rows beyond the model's positions."""
    reinit_weights: bool = False
    """Random weights, made from the model's config."""
    load_in_4bit: bool = False
    """Quantize the base of an adapter to 4 bits while it is read. The keys below are those of transformers."""
    load_in_8bit: bool = False
    """Quantize the base of an adapter to int8 with a scale per row."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = True
    """Quantize the scales too."""
    bnb_4bit_compute_dtype: ComputeDtype | None = None
    """Dtype of the products with dequantized weights. None: the model's."""
    llm_int8_skip_modules: tuple[Text, ...] = ()
    """Modules that are not quantized, beside the output head."""

    datasets: Annotated[tuple[DatasetConfig, ...], Rule(expected="a list of at least one dataset", holds=bool)]
    test_datasets: tuple[DatasetConfig, ...] = ()
    """Evaluation data."""
    val_set_size: ShareOrCount = 0
    """Held out of `datasets` for evaluation: a fraction below 1, or a number of examples."""
    sequence_len: Count = 2048
    """Maximum tokens of a row."""
    sample_packing: bool = False
    """Several examples per row, which do not attend to each other. Packed rows are padded to `sequence_len`."""
    pad_to_sequence_len: bool = False
    train_on_inputs: bool = False
    """Whether the loss includes the prompt's tokens."""
    excess_length_strategy: Literal["split", "truncate", "drop", "raise"] = "split"
    """What to do with an example longer than `sequence_len`."""
    dataset_exact_deduplication: bool = False
    """Keep only the first of equal examples."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """The order of rows in an epoch."""
    chat_template: Text | None = None
    """The name of a template (see data/templates.py). None: the tokenizer's own."""
    chat_template_jinja: Text | None = None
    """A template or the path of one. None: the tokenizer's own."""
    tokenizer_config: Text | None = None
    """The folder or hub id of a tokenizer. None: `base_model`."""
    special_tokens: dict[SpecialToken, Any] | None = None
    """Tokens of the vocabulary that have these roles."""
    tokens: tuple[Text, ...] = ()
    """Tokens of the vocabulary that are never split."""
    processor_type: Text = "AutoProcessor"
    """The class of the processor, for data with images. It is read from the folder of the tokenizer."""
    processor_kwargs: dict[str, Any] | None = None
    """Settings that replace the processor's saved ones, such as `max_pixels`."""
    image_size: ImageSize = ()
    """`[width, height]`, or the side of a square that images are padded to. Empty: as they are."""
    image_resize_algorithm: Literal["bilinear", "bicubic", "lanczos", "nearest", "box", "hamming"] = "bilinear"

    batch_size: Count | None = None
    """Rows in an optimizer step. None: `micro_batch_size` × `gradient_accumulation_steps`."""
    micro_batch_size: Count | None = None
    """Rows in a forward pass. None: 1; with `batch_size`, derived from it, or the fastest."""
    eval_batch_size: Count | None = None
    """None: `micro_batch_size`."""
    gradient_accumulation_steps: Count | None = None
    """Backward passes per step. None: 1, or as `batch_size` requires."""
    num_epochs: Positive = 1.0
    max_steps: Count | None = None
    """Length of the run in steps, whatever `num_epochs` is."""

    rl: Literal["dpo"] | None = None
    """Training on preference pairs, by TRL's DPOTrainer. None: on the tokens of the data."""
    rl_beta: Positive = 0.1
    """How much a deviation from the reference model costs."""
    dpo_loss_type: tuple[DpoLoss, ...] = ("sigmoid",)
    """Losses that are added up."""
    dpo_loss_weights: tuple[float, ...] = ()
    """Their weights. Empty: 1 each."""
    dpo_label_smoothing: ShareBelowOne = 0.0
    dpo_use_weighting: bool = False
    """Weigh pairs by the model's own probability of their answers (WPO)."""

    teacher_model: Text | None = None
    """Distillation: a folder or hub id of the model whose probabilities are learned."""
    kd_alpha: Share = 1.0
    """The share of the teacher's probabilities in the loss; the rest is the cross-entropy of the data."""
    kd_temperature: Positive = 1.0
    """Of both models' probabilities."""

    learning_rate: Positive = 2e-5
    lr_scheduler: Scheduler = "cosine"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Arguments of the scheduler, such as `min_lr`."""
    warmup_steps: Warmup | None = None
    """Steps, or a share of all steps."""
    warmup_ratio: Share | None = None
    """Warmup as a share of all steps."""
    optimizer: Optimizer = "adamw"
    optim_args: str | None = None
    """Further settings of the optimizer: `momentum=0.9,nesterov=True` of sgd."""
    adam_beta1: ShareBelowOne = 0.9
    adam_beta2: ShareBelowOne = 0.999
    adam_epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    nonfinite: Literal["raise", "skip"] = "raise"
    """What a step does when a gradient is not finite."""
    max_grad_norm: NotNegative = 1.0
    """0: no clipping."""

    output_dir: Text = "out"
    save_strategy: SaveStrategy = "steps"
    save_steps: CountOrShare | None = None
    """Steps between checkpoints under `save_strategy: steps`. None: one at the end; with `load_best_model_at_end`, one
    at each evaluation.
    """
    save_total_limit: Count | None = None
    """Checkpoints to keep; older ones are deleted. None: all."""
    save_only_model: bool = False
    """Checkpoints without optimizer state; a run cannot resume from them."""
    eval_strategy: SaveStrategy | None = None
    """None: see `evaluates`."""
    eval_steps: CountOrShare | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: Literal["eval_loss", "loss"] | None = None
    """Both are the evaluation loss, the only metric."""
    early_stopping_patience: Count | None = None
    """Evaluations without improvement after which the run ends."""
    logging_steps: Count = 1
    report_to: Trackers = ()
    """Names of trackers, as in transformers."""
    run_name: Text | None = None
    """The name of the run in the trackers."""
    hub_model_id: Text | None = None
    """The repository of the hub that the result is uploaded to."""

    seed: Seed = 42
    data_seed: Seed | None = None
    """For the order of examples. None: `seed`."""
    full_determinism: bool = False
    """Deterministic operators only, where torch has them; slower on a GPU."""
    bf16: Bf16 = True
    """Weights in bf16 with exact fp32 master weights. False: fp32 weights."""
    tf32: Tf32 | None = None
    """Whether fp32 matrix products may use TF32. None: torch's setting."""
    attn_implementation: Text | None = None
    """As in transformers: sdpa, flash_attention_2, eager, … None: its choice, and `outsize_varlen` for packed rows."""
    sdp_kernel: SdpKernel = "auto"
    """The kernel of sdpa: flash, cudnn, efficient or math. auto: torch's choice, which the plan names."""
    dataloader_num_workers: CountFromZero = 0

    gpu_memory: Size | None = None
    """Maximum GPU memory, CUDA context included. None: the free memory."""
    host_memory: Size | None = None
    """Maximum host memory. None: the free memory, less a tenth."""
    device: Text | None = None
    """`cuda`, `cpu`, `sim:24GiB`, `sim:rtx4090`. None: the GPU if there is one."""
    plan_file: PlanFile | None = field(default=None, metadata={"key": "plan"})
    """A plan file to use unchanged."""
    pins: dict[PinName, CountFromZero] | None = field(default=None, metadata={"key": "plan"})
    """Fixed parts of the plan; the search decides the rest."""
    activation_offloading: ActivationOffloading = "auto"
    """What happens to activations (model/offloading.py). `auto`: the plan decides."""
    chunk_bytes: Size | None = None
    """Upper bound of a chunk. None: the library's."""
    chunked_loss: bool | None = None
    """Compute the loss in chunks of tokens. None: if batches are larger than a chunk and the model allows it."""
    tile_tokens: CountFromZero = TILE_TOKENS
    """Length of the tiles of rows longer than two of them. 0: no tiles."""

    adapter: Adapter | None = None
    """`lora`: adapters beside frozen weights. `osft`: weights outside of their large singular directions. None: all
    weights are trained.
    """
    unfrozen_parameters: tuple[Text, ...] = ()
    """Patterns of the names of parameters to train. Empty: all."""
    freeze_mm_modules: bool = False
    """Do not train vision and audio encoders."""
    lora_r: Count = 8
    lora_alpha: Annotated[float | int, Rule(expected="a positive number", holds=lambda value: value > 0)] = 16
    lora_dropout: ShareBelowOne = 0.0
    lora_target_modules: TargetModules = ()
    """Names, or a regex of whole module names."""
    lora_target_linear: bool = False
    """All linear layers except the output head."""
    lora_model_dir: Text | None = None
    """The folder of an adapter to continue with; its settings hold."""
    lora_modules_to_save: tuple[Text, ...] = ()
    """Modules that are fully trained in addition to the adapter."""
    lora_fp32: bool = False
    """Adapters in fp32 over a bf16 base, as PEFT makes them. False: in the base's dtype, with fp32 master weights."""
    lora_mlp_kernel: bool = True
    """Fuse the LoRA layers outside of attention, and gated MLPs as a whole (lora/fuse.py)."""
    lora_qkv_kernel: bool = True
    """Fuse the LoRA layers of attention, except its last linear layer."""
    lora_o_kernel: bool = True
    """Fuse the last linear layer of attention."""
    peft_use_rslora: bool = False
    peft_use_dora: bool = False
    osft_unfreeze_rank_ratio: Share | None = None
    """Share of each weight's directions that are trained."""
    osft_effective_rank: Positive | None = None
    """Frozen directions instead: a count, or a share up to 1."""
    osft_target_modules: TargetModules | None = None
    """Names of modules, or a regex of whole names. None: all linear layers except the output head."""
    osft_rank_pattern: dict[str, float] | None = None
    """By regex of module names: another share, or number."""
    osft_others: Literal["train", "freeze", "norms"] = "train"
    """What happens to all other parameters."""

    prune: PruneConfig | None = None
    """For `outsize prune`: variants of the layers, and how they are trained."""

    resume_from_checkpoint: Checkpoint | None = None
    """A checkpoint's folder; true: the newest in `output_dir`, which must have one."""
    auto_resume_from_checkpoints: bool = False
    """The newest checkpoint in `output_dir`, if there is one."""

    notes: tuple[str, ...] = field(default=(), metadata={"key": ""})
    """Notes for the user on keys of other tools."""
    environment: dict[str, str] = field(default_factory=dict, metadata={"key": ""})
    """Environment variables for trackers."""
    replaced_optimizer: str | None = field(default=None, metadata={"key": ""})
    """The optimizer that was given, if `optimizer` runs in its place."""
    overridden: tuple[str, ...] = field(default=(), metadata={"key": ""})
    """Keys that were given on the command line, with `--set`."""

    @property
    def quantization(self) -> Quantization | None:
        if not self.load_in_4bit and not self.load_in_8bit:
            return None
        return Quantization(**{field.name: getattr(self, field.name) for field in fields(Quantization)})

    @property
    def has_eval_data(self) -> bool:
        return bool(self.test_datasets) or self.val_set_size > 0

    @property
    def evaluates(self) -> Literal["no", "steps", "epoch"]:
        """The effective `eval_strategy`. If left out and there is evaluation data: every `eval_steps` if given,
        otherwise every epoch.
        """
        if self.eval_strategy is not None:
            return self.eval_strategy
        if not self.has_eval_data:
            return "no"
        return "epoch" if self.eval_steps is None else "steps"
