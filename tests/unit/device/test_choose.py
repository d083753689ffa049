"""choose_device: one object per name, and an error that lists the names."""

import pytest
import torch

from outsize.base.errors import ConfigError
from outsize.device.choose import choose_device
from outsize.device.cpu import CpuDevice
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import CATALOG


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_names_give_devices_of_their_kind() -> None:
    cpu, sim = choose_device("cpu"), choose_device("sim:64MiB")
    assert type(cpu) is CpuDevice and cpu.kind == "cpu"
    assert (
        type(sim) is SimDevice
        and sim.kind == "sim"
        and sim.spec.gpu_bytes == 64 * 2**20
        and sim.torch_device == torch.device("cpu")
    )


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_machine_of_the_catalog_can_be_simulated(name: str) -> None:
    assert choose_device(f"sim:{name}").spec is CATALOG[name]


def test_one_name_is_one_device() -> None:
    """Engines on one device share its budget."""
    assert choose_device("sim:64MiB") is choose_device("sim:64MiB")
    assert choose_device("sim:64MiB") is not choose_device("sim:65MiB")


def test_a_device_is_its_own_name() -> None:
    device = CpuDevice()
    assert choose_device(device) is device and choose_device("cpu") is not device


def test_without_a_gpu_the_default_is_the_cpu(no_gpu: None) -> None:
    assert choose_device(None) is choose_device("cpu")


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_without_a_gpu_says_what_to_use_instead(name: str, no_gpu: None) -> None:
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU.*device='cpu'.*outsize doctor"):
        choose_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "tpu:0", "sim", "sim:", "cpu:0", "CPU"])
def test_an_unknown_name_is_an_error_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cuda, cpu, or sim:<catalog name, .yaml file or size>"):
        choose_device(name)


def test_an_unknown_machine_is_an_error_with_the_catalog() -> None:
    with pytest.raises(ConfigError, match="rtx4090"):
        choose_device("sim:rtx9999")
    with pytest.raises(ConfigError, match="GiB"):
        choose_device("sim:24GB")


def test_a_name_that_failed_is_not_remembered(no_gpu: None) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            choose_device("cuda")


def test_a_gpu_number_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError):
        choose_device("cuda:first")
