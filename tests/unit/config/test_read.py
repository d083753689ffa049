"""Reading a run file: accepted spellings, and all problems in one error, each with its key."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import ConfigError
from outsize.base.records import fields_by_key
from outsize.config.keys import TABLE, our_name
from outsize.config.read import parse_config, read_config
from outsize.config.run import DatasetConfig, RunConfig

LEAST: dict[str, Any] = {"base_model": "m", "datasets": [{"path": "d"}]}
LEAST_TEXT = "base_model: m\ndatasets: [{path: d}]\n"
LEAST_CONFIG = RunConfig(base_model="m", datasets=(DatasetConfig(path="d"),))
EVAL = {"val_set_size": 0.1}
BEST = {**EVAL, "load_best_model_at_end": True, "eval_steps": 10}
LORA = {"adapter": "lora", "lora_target_linear": True}


def problems_of(mapping: dict[str, Any]) -> list[str]:
    """The lines of the one error, without its heading; empty where there is none."""
    try:
        parse_config(mapping, "run.yaml")
    except ConfigError as error:
        heading, *lines = str(error).split("\n  ")
        assert heading.startswith("run.yaml: ")
        return lines
    return []


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_the_least_file_has_the_defaults(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, LEAST_TEXT)) == parse_config(LEAST, "here") == LEAST_CONFIG


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("learning_rate: 2e-5", "learning_rate", 2e-5),
        ("learning_rate: '2e-5'", "learning_rate", 2e-5),
        ("learning_rate: 1", "learning_rate", 1.0),
        (
            "lr_scheduler_kwargs: {min_lr: 1e-6, decay_type: linear}",
            "lr_scheduler_kwargs",
            {"min_lr": 1e-6, "decay_type": "linear"},
        ),
        ("num_epochs: 3", "num_epochs", 3.0),
        ("max_steps:", "max_steps", None),
        ("sequence_len: null", "sequence_len", 2048),
        ("val_set_size: 5e-2", "val_set_size", 0.05),
        ("val_set_size: 100", "val_set_size", 100),
        ("lora_alpha: 32\nadapter: lora\nlora_target_modules: [q_proj]", "lora_alpha", 32),
        ("save_strategy: no", "save_strategy", "no"),
        ("eval_strategy: 'no'", "eval_strategy", "no"),
        ("optimizer: adamw_torch_fused", "optimizer", "adamw"),
        ("bf16: auto", "bf16", True),
        ("report_to: none", "report_to", ()),
        ("report_to: wandb", "report_to", ("wandb",)),
        ("gpu_memory: 24GiB", "gpu_memory", "24GiB"),
        ("host_memory: 1000000", "host_memory", 1000000),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", True),
        ("resume_from_checkpoint: out/checkpoint-3", "resume_from_checkpoint", "out/checkpoint-3"),
        ("plan: plan.json", "plan_file", "plan.json"),
        ("plan: {n_persist: 3, n_swap: 0}", "pins", {"n_persist": 3, "n_swap": 0}),
        (
            "test_datasets: [x.jsonl, {path: y, type: completion}]",
            "test_datasets",
            (DatasetConfig(path="x.jsonl"), DatasetConfig(path="y", type="completion")),
        ),
        ("test_datasets: x.jsonl", "test_datasets", (DatasetConfig(path="x.jsonl"),)),
        ("test_datasets: [{path: x, split: test, name:}]", "test_datasets", (DatasetConfig(path="x", split="test"),)),
    ],
)
def test_values_are_read_as_people_write_them(tmp_path: Path, line: str, field: str, value: object) -> None:
    read = getattr(read_config(write(tmp_path, LEAST_TEXT + line)), field)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"learning_rte": 1}, "learning_rte: unknown key; did you mean learning_rate?"),
        ({"zzz": 1}, "zzz: unknown key."),
        ({"notes": ["x"]}, "notes: unknown key."),
        ({"plan_file": "x"}, "plan_file: unknown key."),
        ({"learning_rte": False}, "learning_rte: unknown key; did you mean learning_rate?"),
        ({"base_model": None}, "base_model: missing. Give a non-empty string."),
        ({"base_model": ""}, "base_model: '' is not a non-empty string."),
        ({"datasets": []}, "datasets: [] is not a list of at least one dataset."),
        ({"datasets": 5}, "datasets: 5 is not a list of at least one dataset."),
        ({"datasets": None}, "datasets: missing. Give a list of at least one dataset."),
        ({"datasets": ["a", 5]}, "datasets.1: 5 is not a mapping, or its path alone."),
        ({"datasets": [{"path": "d", "pth": "e"}]}, "datasets.0.pth: unknown key; did you mean path?"),
        ({"datasets": [{"type": "completion"}]}, "datasets.0.path: missing. Give a non-empty string."),
        (
            {"datasets": [{"path": "d", "train_on_eos": "first"}]},
            "datasets.0.train_on_eos: 'first' is not one of all, turn, last, none.",
        ),
        (
            {"datasets": [{"path": "d", "ds_type": "arrow"}]},
            "datasets.0.ds_type: 'arrow' is not one of json, jsonl, text, csv, parquet.",
        ),
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is not a positive number."),
        ({"learning_rate": "nan"}, "learning_rate: 'nan' is not a positive number."),
        ({"learning_rate": float("inf")}, "learning_rate: inf is not a positive number."),
        ({"learning_rate": True}, "learning_rate: true is not a positive number."),
        ({"learning_rate": -1}, "learning_rate: -1 is not a positive number."),
        ({"micro_batch_size": True}, "micro_batch_size: true is not a positive integer."),
        ({"micro_batch_size": 1.0}, "micro_batch_size: 1.0 is not a positive integer."),
        ({"micro_batch_size": "4"}, "micro_batch_size: '4' is not a positive integer."),
        ({"micro_batch_size": 0}, "micro_batch_size: 0 is not a positive integer."),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: 0 is not a positive integer."),
        ({"sample_packing": "yes please"}, "sample_packing: 'yes please' is not true or false."),
        ({"output_dir": 5}, "output_dir: 5 is not a non-empty string."),
        ({"val_set_size": 1.5}, "val_set_size: 1.5 is not a fraction below 1 or a number of examples."),
        ({"warmup_ratio": 1.1}, "warmup_ratio: 1.1 is not a number from 0 to 1."),
        ({"adam_beta2": 1}, "adam_beta2: 1 is not a number from 0 to below 1."),
        ({"seed": -1}, "seed: -1 is not an integer from 0 to 4294967295."),
        (
            {"excess_length_strategy": "cut"},
            "excess_length_strategy: 'cut' is not one of split, truncate, drop, raise.",
        ),
        ({"save_strategy": True}, "save_strategy: true is not one of no, steps, epoch."),
        ({"optim": "adafactor"}, "optim: 'adafactor' is not one of adamw, lion, sgd."),
        ({"adapter": "qlora", "lora_r": 4}, "adapter: 'qlora' is not lora or osft, or qlora with load_in_4bit: true."),
        ({"gpu_memory": 2.5}, "gpu_memory: 2.5 is not a size such as '24GiB' or a number of bytes."),
        (
            {"gpu_memory": "24GB"},
            "gpu_memory: '24GB' is not a size such as '24GiB' or '123456B'. GB means 10^9 to some and 2^30 to others; use GiB.",
        ),
        ({"plan": 3}, "plan: 3 is not the path of a plan file or a mapping of pins."),
        ({"plan": {"n_persit": 3}}, "plan.n_persit: unknown key; did you mean n_persist?"),
        ({"plan": {"n_persist": -1}}, "plan.n_persist: -1 is not a non-negative integer."),
        ({"lr_scheduler_kwargs": [1]}, "lr_scheduler_kwargs: [1] is not a mapping."),
        (
            {"resume_from_checkpoint": 5},
            "resume_from_checkpoint: 5 is not the folder of a checkpoint or true for the newest one.",
        ),
    ],
)
def test_one_fault_is_one_line_with_its_key(change: dict[str, Any], line: str) -> None:
    assert problems_of({**LEAST, **change}) == [line]


@pytest.mark.parametrize(
    ("change", "key", "part"),
    [
        (
            {"batch_size": 6, "micro_batch_size": 4},
            "batch_size",
            "6 is not micro_batch_size (4) × gradient_accumulation_steps (None)",
        ),
        (
            {"batch_size": 6, "micro_batch_size": 3, "gradient_accumulation_steps": 3},
            "batch_size",
            "6 is not micro_batch_size (3) × gradient_accumulation_steps (3)",
        ),
        ({"batch_size": 6, "plan": "plan.json"}, "batch_size", "Set micro_batch_size as in the plan"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_steps", "conflicts with warmup_ratio"),
        ({"warmup_steps": 3, "lr_scheduler": "constant"}, "lr_scheduler", "constant_with_warmup"),
        ({**EVAL, "test_datasets": ["t"]}, "test_datasets", "conflicts with val_set_size (0.1)"),
        ({"eval_steps": 5}, "eval_steps", "needs evaluation data. Set test_datasets or val_set_size"),
        ({"eval_strategy": "epoch"}, "eval_strategy", "needs evaluation data"),
        ({**EVAL, "eval_strategy": "steps"}, "eval_strategy", "steps needs eval_steps"),
        ({**EVAL, "eval_strategy": "epoch", "eval_steps": 5}, "eval_steps", "conflicts with eval_strategy: epoch"),
        ({"save_strategy": "epoch", "save_steps": 5}, "save_steps", "conflicts with save_strategy: epoch"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", "needs evaluation data"),
        (
            {**BEST, "save_strategy": "epoch"},
            "load_best_model_at_end",
            "save_strategy is epoch and eval_strategy is steps",
        ),
        (
            {**EVAL, "load_best_model_at_end": True, "save_strategy": "no", "eval_strategy": "no"},
            "load_best_model_at_end",
            "save_strategy is no and eval_strategy is no",
        ),
        ({**BEST, "save_steps": 15}, "load_best_model_at_end", "save_steps (15) is not a multiple of eval_steps (10)"),
        ({**EVAL, "early_stopping_patience": 3}, "early_stopping_patience", "Set load_best_model_at_end: true"),
        ({**EVAL, "metric_for_best_model": "loss"}, "metric_for_best_model", "Set load_best_model_at_end: true"),
        ({"lora_r": 8}, "lora_r", "Set adapter: lora"),
        ({"use_dora": True}, "peft_use_dora", "Set adapter: lora"),
        ({"adapter": "lora"}, "adapter", "lora_target_linear: true"),
        ({**LORA, "reinit_weights": True}, "reinit_weights", "random"),
        (
            {"resume_from_checkpoint": "x", "auto_resume_from_checkpoints": True},
            "resume_from_checkpoint",
            "conflicts with auto_resume_from_checkpoints",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_reported(change: dict[str, Any], key: str, part: str) -> None:
    (line,) = problems_of({**LEAST, **change})
    assert line.startswith(f"{key}: ") and part in line


@pytest.mark.parametrize(
    "change",
    [
        {**BEST, "save_steps": 20, "early_stopping_patience": 3, "metric_for_best_model": "loss"},
        {**EVAL, "load_best_model_at_end": True, "save_strategy": "epoch"},
        {**LORA, "lora_r": 4, "lora_dropout": 0.1},
        {"sample_packing": True, "pad_to_sequence_len": False},
        {"resume_from_checkpoint": False, "auto_resume_from_checkpoints": True},
        {"max_steps": 3, "num_epochs": 1},
        {"lr_scheduler": "constant", "warmup_steps": 0},
    ],
)
def test_keys_that_go_together_are_taken(change: dict[str, Any]) -> None:
    assert problems_of({**LEAST, **change}) == []


def test_a_wrong_value_is_not_taken_for_one_that_is_missing() -> None:
    assert [
        line.split(":")[0]
        for line in problems_of({**LEAST, "val_set_size": "lots", "load_best_model_at_end": True, "eval_steps": 3})
    ] == ["val_set_size"]


def test_a_misspelled_key_is_one_line_and_what_it_would_have_said_is_not_missing() -> None:
    file = {"base_modle": "m", "dataset": [{"path": "d"}], "adaptor": "lora", "lora_r": 4}
    assert problems_of(file) == [
        "base_modle: unknown key; did you mean base_model?",
        "dataset: unknown key; did you mean datasets?",
        "adaptor: unknown key; did you mean adapter?",
    ]


def test_a_value_that_is_nearly_one_of_a_list_names_it() -> None:
    (kind, optimizer) = problems_of({**LEAST, "datasets": [{"path": "d", "type": "alpacca"}], "optimizer": "adamww"})
    assert kind == "datasets.0.type: 'alpacca' is unknown; did you mean alpaca?"  # not all of them
    assert optimizer == "optimizer: 'adamww' is not one of adamw, lion, sgd; did you mean adamw?"


def test_all_mistakes_of_a_file_and_of_the_command_line_are_reported_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "datasets: []\nlearning_rte: 1e-4\nseed: x\nseed: y\nwarmup_steps: 5\nwarmup_ratio: 0.1\ndeepspeed: zero3.json\n",
    )
    with pytest.raises(ConfigError) as caught:
        read_config(path, ["no_equals", "plan.n_swop=1"])
    heading, *lines = str(caught.value).split("\n  ")
    assert heading == f"{path}: 9 problems. docs/config.md describes every key."
    assert [line.split(":")[0] for line in lines] == [
        "seed",
        "--set no_equals",
        "deepspeed",
        "datasets",
        "learning_rte",
        "seed",
        "plan.n_swop",
        "base_model",
        "warmup_steps",
    ]


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("num_train_epochs", "num_epochs", 2.0),
        ("per_device_train_batch_size", "micro_batch_size", 4),
        ("per_device_eval_batch_size", "eval_batch_size", 4),
        ("max_seq_length", "sequence_len", 128),
        ("max_length", "sequence_len", 128),
        ("cutoff_len", "sequence_len", 128),
        ("packing", "sample_packing", True),
        ("lr_scheduler_type", "lr_scheduler", "linear"),
        ("optim", "optimizer", "adamw"),
        ("model_name_or_path", "base_model", "m"),
    ],
)
def test_a_name_from_elsewhere_is_ours(alias: str, name: str, value: object) -> None:
    others = {key: item for key, item in LEAST.items() if key != name}
    config = parse_config({**others, alias: value}, "here")
    assert getattr(config, name) == value and config.notes == ()
    assert problems_of({**others, name: value, alias: value}) == [
        f"{alias}: means the same as {name}, which is given too. Keep {name}."
    ]
    assert problems_of({**others, name: value, alias: None}) == problems_of({**others, alias: value, name: None}) == []


KEYS = st.sampled_from([*fields_by_key(RunConfig), *fields_by_key(DatasetConfig), *TABLE, "no_key"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["", "no", "steps", "2e-5", "24GiB", "lora", "1e999"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(KEYS, ANYTHING, max_size=6))
def test_whatever_is_written_is_taken_or_reported_and_never_a_crash(mapping: dict[str, Any]) -> None:
    for line in problems_of({**LEAST, **mapping}):
        assert line.split(":")[0].split(".")[0] in {*LEAST, *mapping, *map(our_name, mapping)}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("seed: 1\nseed: 1\n", "seed: given twice, in lines 3 and 4."),
        ("plan: {n_swap: 1,\n n_swap: 2}", "n_swap: given twice, in lines 3 and 4."),
    ],
)
def test_a_key_given_twice_is_reported_with_its_lines(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, LEAST_TEXT + text))
    assert str(caught.value).split("\n  ")[1].startswith(place)


def test_a_merge_key_may_repeat_what_it_merges(tmp_path: Path) -> None:
    text = "base_model: m\ndatasets: [&one {path: d, split: a}]\ntest_datasets: [&two {<<: *one, split: b}, {<<: *two, split: c}]\n"
    assert [data.split for data in read_config(write(tmp_path, text)).test_datasets] == ["b", "c"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("base_model: m\n  seed: 1\n", "in line 2, column 7"),
        ("base_model: 'm\n", "in line 2, column 1"),
        ("base_model: m\nseed: \x07\n", "in line 2, column 7"),
        ("base_model: !!python/name:os.system x\n", "in line 1, column 13"),
        ("seed: 2024-13-01\n", "month"),
        ("", "is empty"),
        ("- base_model: m\n", "holds a list"),
        ("base_model\n", "holds a str"),
    ],
)
def test_a_text_that_is_no_mapping_is_refused_with_its_place(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}") and part in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"base_model: \xe9")
    for name, part in (("none.yaml", "No such file"), (".", "it is a folder"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ConfigError) as caught:
            read_config(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (["learning_rate=2e-5"], "learning_rate", 2e-5),
        (["seed=1", "seed=2"], "seed", 2),
        (["output_dir=a=b"], "output_dir", "a=b"),
        (["report_to=[wandb, mlflow]"], "report_to", ("wandb", "mlflow")),
        (["sequence_len="], "sequence_len", 2048),
        (["sequence_len=7"], "sequence_len", 7),
        (["max_length=7"], "sequence_len", 7),
        (["datasets.0.path=x"], "datasets", (DatasetConfig(path="x"),)),
        (["datasets.1.path=x"], "datasets", (DatasetConfig(path="d"), DatasetConfig(path="x"))),
        (["datasets.1=x"], "datasets", (DatasetConfig(path="d"), DatasetConfig(path="x"))),
        (["datasets.0.path=x"], "test_datasets", (DatasetConfig(path="d"),)),
        (["plan.n_persist=3", "plan.n_swap=1"], "pins", {"n_persist": 3, "n_swap": 1}),
        (["test_datasets=null", "test_datasets.0.path=x"], "test_datasets", (DatasetConfig(path="x"),)),
    ],
)
def test_overrides_change_what_the_file_says(tmp_path: Path, overrides: list[str], field: str, value: object) -> None:
    path = write(tmp_path, "base_model: m\ndatasets: &d [{path: d}]\ntest_datasets: *d\nmax_seq_length: 512\n")
    assert getattr(read_config(path, overrides), field) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed", "there is no ="),
        ("=3", "a part of the key is empty"),
        ("plan..n_swap=3", "a part of the key is empty"),
        ("report_to=[a", "the value: not valid YAML in line 1, column 3"),
        ("plan={n_swap: 1, n_swap: 1}", "given twice"),
        ("datasets.2.path=x", "Use 0 to 1"),
        ("datasets.last.path=x", "'last' is not an index"),
        ("base_model.x=1", "would be inside 'm'"),
    ],
)
def test_a_malformed_override_is_reported_as_it_was_written(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, LEAST_TEXT), [text])
    _, line = str(caught.value).split("\n  ")
    assert line.startswith(f"--set {text}: ") and part in line
