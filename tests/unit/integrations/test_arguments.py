from pathlib import Path
from typing import Any

import pytest
import trainers
import zoo

from outsize.base.errors import ConfigError
from outsize.integrations.arguments import optimizer_of, take_over, update_mode
from outsize.integrations.hf import OutsizeTrainer

REFUSED: dict[str, Any] = {
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "fsdp": "full_shard",
    "fp16": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "auto_find_batch_size": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "parallelism_config": object(),
    "optim_args": "beta3=0.9",
    "optim_target_modules": ["q_proj"],
    "enable_jit_checkpoint": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_beside_us_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Set afterwards: some cannot even be constructed on this machine."""
    args = trainers.arguments(tmp_path)
    assert hasattr(args, name), "transformers knows it by another name"
    setattr(args, name, REFUSED[name])
    with pytest.raises(ConfigError, match=f"{name}=.*: .*(leave|use|choose)"):
        take_over(args)


def test_everything_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    args = trainers.arguments(tmp_path, optim="adafactor", gradient_checkpointing=True)
    for name, value in REFUSED.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError) as refused:
        take_over(args, optimizers=(object(), None), optimizer_cls_and_kwargs=(object, {}))
    for name in (
        *(name for name in REFUSED if name != "optim_args"),
        "optim='adafactor'",
        "optimizers",
        "optimizer_cls_and_kwargs",
    ):
        assert name in str(refused.value)


@pytest.mark.parametrize("positional", [False, True])
def test_a_trainer_refuses_before_it_is_made(positional: bool, tmp_path: Path) -> None:
    args = trainers.arguments(tmp_path)
    args.deepspeed = "ds.json"
    model = zoo.make("one-block")
    given: dict[str, Any] = {"optimizers": (trainers.Reference(model.parameters()), None)}
    with pytest.raises(ConfigError, match=r"deepspeed.*optimizers"):
        OutsizeTrainer(model, args, **given) if positional else OutsizeTrainer(model=model, args=args, **given)


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create_scheduler"):
        trainers.ours(tmp_path, kind="one-block", optimizers=(None, object()))


def test_what_the_plan_decides_is_turned_off_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = trainers.arguments(tmp_path, gradient_checkpointing=True)
    args.activation_offloading = True  # type: ignore[attr-defined]
    with caplog.at_level("INFO", logger="outsize"):
        take_over(args)
    assert not args.gradient_checkpointing and not args.activation_offloading  # type: ignore[attr-defined]
    assert (
        "gradient_checkpointing is turned off" in caplog.text and "activation_offloading is turned off" in caplog.text
    )


def test_every_adamw_of_torch_is_ours_and_the_usual_arguments_pass(tmp_path: Path) -> None:
    for optim in ("adamw_torch", "adamw_torch_fused"):
        take_over(
            trainers.arguments(tmp_path, optim=optim, bf16=True, label_smoothing_factor=0.1, neftune_noise_alpha=1.0)
        )


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    args = trainers.arguments(
        tmp_path, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.1, learning_rate=0.5
    )
    spec = optimizer_of(args, decay=["a", "c"], trainable=["a", "a.bias", "norm"])
    assert [(group["params"], group["weight_decay"]) for group in spec.groups] == [
        (["a"], 0.1),
        (["a.bias", "norm"], 0.0),
    ]
    assert (spec.lr, spec.betas, spec.eps, spec.max_grad_norm) == (0.5, (0.8, 0.95), 1e-6, trainers.MAX_GRAD_NORM)
    assert [group["params"] for group in optimizer_of(args, decay=[], trainable=["norm"]).groups] == [["norm"]], (
        "no empty group"
    )


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf")])
def test_a_norm_that_never_clips_is_no_clipping_and_gradients_are_not_kept(norm: float, tmp_path: Path) -> None:
    args = trainers.arguments(tmp_path, max_grad_norm=norm)
    assert optimizer_of(args, [], ["a"]).max_grad_norm is None and update_mode(args) == "in_backward"
    args.gradient_accumulation_steps = 2
    assert update_mode(args) == "after_step"
