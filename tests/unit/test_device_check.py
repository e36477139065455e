"""The product whose bits are known: exact on this CPU, and a single wrong element is seen."""

from pathlib import Path

import pytest
import torch

from mt_resilient.training.device_check import CASES, Case, block, look, products, unseen


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.dtype))
def test_every_partial_sum_is_exact(case: Case) -> None:
    left, right, expected = block(case)
    largest = (left.abs() @ right.abs()).max().item()  # no partial sum, in whatever order, is larger
    assert largest <= 2 ** (24 if case.dtype is torch.float32 else 8)
    assert torch.equal(left @ right, expected)
    assert torch.equal(left.to(case.dtype).long(), left)  # the factors too
    assert expected.unique().numel() > 50  # and not a product of zeros


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.dtype))
def test_right_on_this_cpu_in_any_order_of_sums(case: Case) -> None:
    assert products("cpu", case, 512)()
    left, right, expected = block(case)
    order = torch.randperm(case.inner)
    found = left[:, order].to(case.dtype) @ right[order].to(case.dtype)
    assert torch.equal(found, expected.to(case.dtype))


def test_one_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = multiply(left, right)
        if found.dtype is torch.bfloat16:
            found[300 % found.shape[0], 17].view(torch.int16).bitwise_xor_(1)
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert look("cpu", 0.0) == {"device": "cpu", "products": 2, "wrong": 1, "free_bytes": 0, "total_bytes": 0}


def test_a_device_that_is_not_there() -> None:
    found = look("cuda:77", 0.0)
    assert found["device"] == "cuda:77"
    assert found["error"]


@pytest.mark.parametrize(
    ("files", "built", "hidden", "named"),
    [
        ((), {"musa": False, "cuda": True}, None, []),
        (("nvidia0", "nvidia1", "nvidiactl"), {"musa": False, "cuda": True}, None, ["cuda"]),
        (("nvidiactl", "nvidia-uvm"), {"musa": False, "cuda": True}, None, []),
        (("nvidia0",), {"musa": False, "cuda": False}, None, []),
        (("nvidia0",), {"musa": False, "cuda": True}, "", []),
        (("nvidia0",), {"musa": False, "cuda": True}, "0", ["cuda"]),
        (("mtgpu.0",), {"musa": True, "cuda": False}, None, ["musa"]),
    ],
)
def test_devices_that_the_machine_has_and_torch_does_not_find_are_broken(
    files: tuple[str, ...], built: dict[str, bool], hidden: str | None, named: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    environment = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    assert [each["device"] for each in unseen(built, tmp_path, environment)] == named
