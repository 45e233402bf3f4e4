from __future__ import annotations

import pytest

from eagle_export.engines import architectures
from eagle_export.engines.architectures import (
    DEFAULT_CAPABILITIES,
    RTX_CAPABILITIES,
    arch_name,
    capability,
    check_architectures,
    local_capability,
)
from eagle_run.errors import EagleError, UsageError


@pytest.mark.parametrize(
    ("written", "found"),
    [("sm89", "8.9"), ("8.9", "8.9"), ("SM120", "12.0"), ("12.1", "12.1"), ("89", "8.9")],
)
def test_both_ways_to_write_an_architecture(written: str, found: str) -> None:
    assert capability(written) == found
    assert capability(arch_name(found)) == found


@pytest.mark.parametrize("written", ["", "ada", "sm", "8.9.1", "rtx4090", "sm8"])
def test_what_is_no_architecture(written: str) -> None:
    with pytest.raises(UsageError, match="expected a form like sm89"):
        capability(written)


def test_architectures_come_out_once_and_ascending() -> None:
    assert check_architectures("tensorrt-rtx", "fp16", ["sm120", "8.9", "sm89"]) == ("8.9", "12.0")
    assert check_architectures("tensorrt-rtx", "fp8", []) == DEFAULT_CAPABILITIES
    everything = [arch_name(one) for one in RTX_CAPABILITIES]
    assert check_architectures("tensorrt-rtx", "fp16", everything) == RTX_CAPABILITIES


@pytest.mark.parametrize(
    ("precision", "arch", "reason", "instead"),
    [
        ("fp8", "sm86", "FP8 matrix units before Ada", "build in fp16 or bf16,"),
        ("fp8", "sm75", "FP8 matrix units before Ada", "build in fp16,"),
        ("bf16", "sm75", "bfloat16 before Ampere", "build in fp16,"),
    ],
)
def test_a_precision_that_a_gpu_lacks(precision: str, arch: str, reason: str, instead: str) -> None:
    with pytest.raises(EagleError, match=reason) as caught:
        check_architectures("tensorrt-rtx", precision, ["sm120", arch])
    assert arch in caught.value.message
    assert "sm120" not in caught.value.message
    assert instead in caught.value.hint
    assert caught.value.parameters == ("precision", "target_arch")


@pytest.mark.parametrize("arch", ["sm90", "10.0", "sm87"])
def test_gpus_that_rtx_does_not_list(arch: str) -> None:
    with pytest.raises(UsageError, match="does not list") as caught:
        check_architectures("tensorrt-rtx", "fp16", [arch])
    assert "sm120" in caught.value.message
    assert "--backend tensorrt`" in caught.value.hint


def test_an_unknown_gpu_comes_with_the_list() -> None:
    with pytest.raises(UsageError, match="sm75, sm80, sm86, sm89, sm120, sm121"):
        check_architectures("tensorrt-rtx", "fp16", ["sm99"])
    with pytest.raises(UsageError, match="tensorrt or tensorrt-rtx"):
        check_architectures("onnxruntime", "fp16", [])


def test_tensorrt_compiles_for_the_gpu_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="only for the GPU of the machine"):
        check_architectures("tensorrt", "fp16", ["sm90"])
    monkeypatch.setattr(architectures, "local_capability", lambda: "9.0")
    assert check_architectures("tensorrt", "fp8", []) == ("9.0",)
    monkeypatch.setattr(architectures, "local_capability", lambda: "8.7")
    with pytest.raises(EagleError, match="fp8 cannot run on sm87"):
        check_architectures("tensorrt", "fp8", [])
    monkeypatch.setattr(architectures, "local_capability", lambda: None)
    with pytest.raises(EagleError, match="no NVIDIA GPU") as caught:
        check_architectures("tensorrt", "fp16", [])
    assert "eagle-export compile BUNDLE --backend tensorrt" in caught.value.hint


def test_the_driver_and_torch_see_the_same_gpu() -> None:
    import torch

    found = local_capability()
    if torch.cuda.is_available():
        assert found == ".".join(map(str, torch.cuda.get_device_capability(0)))
    elif found is not None:  # a GPU that this torch was not built for
        assert capability(found) == found
