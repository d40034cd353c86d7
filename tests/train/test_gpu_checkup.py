"""The program of `holdfast doctor --gpu full`, on the CPU: products, digests, copies."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from holdfast.train import gpu_checkup

pytestmark = pytest.mark.xdist_group("torch")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_checkup.SIDE, "cpu", 64)
    monkeypatch.setitem(gpu_checkup.COPY_BYTES, "cpu", 2**16)


def pair() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 64, generator=generator).to(torch.bfloat16) for _ in range(2)]


def test_a_device_that_computes_right_has_one_digest_and_rates() -> None:
    found = gpu_checkup._device(torch, "cpu", 0, pair(), 0.0)
    assert len(found["digests"]) == 1
    assert min(found[name] for name in ("tflops", "to_device_bytes_s", "to_host_bytes_s", "device_bytes_s")) > 0
    assert found["digests"] == gpu_checkup._device(torch, "cpu", 0, pair(), 0.0)["digests"]


def test_one_bit_of_one_result_changes_the_digest() -> None:
    result = torch.zeros(64, 64, dtype=torch.bfloat16)
    before = gpu_checkup._digest(torch, result)
    result.view(torch.int16)[63, 63] ^= 1
    assert gpu_checkup._digest(torch, result) != before
    swapped = torch.zeros(64, 64, dtype=torch.bfloat16)
    swapped.view(torch.int16)[63, 62] ^= 1
    assert gpu_checkup._digest(torch, swapped) != gpu_checkup._digest(torch, result)


def test_a_product_that_comes_out_differently_has_two_digests() -> None:
    """A matrix whose product is wrong once, as on a GPU with silent corruption."""

    class Flips(torch.Tensor):
        products = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.matmul or getattr(func, "__name__", "") in ("matmul", "__matmul__"):
                cls.products += 1
                if cls.products == 2:
                    result.view(torch.int16)[5, 5] ^= 1
            return result

    left, right = pair()
    found = gpu_checkup._products(torch, "cpu", torch.device("cpu"), [left.as_subclass(Flips), right], 0.0)
    assert len(found["digests"]) == 2


def test_a_device_that_fails_is_a_result() -> None:
    found = gpu_checkup._device(torch, "cpu", 0, [torch.zeros(2, 3), torch.zeros(2, 3)], 0.0)
    # torch 2.15 has "mm: " in between.
    assert re.match("RuntimeError: (mm: )?mat1 and mat2 shapes cannot be multiplied", found["error"])


def test_the_process_that_fails_first_is_the_cause() -> None:
    """Rank 0 waits for rank 1 in vain, and says that later."""
    waits = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    fails = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert gpu_checkup._first_failure([waits, fails]) == 1
    assert waits.poll() is not None, "it does not wait for ever"
    well = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    assert gpu_checkup._first_failure(well) is None


def test_processes_that_do_not_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checkup, "REDUCE_S_MAX", 0.1)
    waits = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert gpu_checkup._first_failure([waits]) == -1
    assert waits.poll() is not None


IN_A_PROCESS = """
from holdfast.train import gpu_checkup
gpu_checkup.REDUCE_BYTES["cpu"] = 2**12
for variables in ({}, {"GLOO_SOCKET_IFNAME": "no-such-device"}):
    print(gpu_checkup.all_reduce("cpu", 2, variables))
"""


def test_an_all_reduce_that_fails_names_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, check=True)
    well, failed = done.stdout.splitlines()
    assert "'bytes_s': " in well
    assert re.search(r"'error': .process [01]: .*no-such-device", failed)
