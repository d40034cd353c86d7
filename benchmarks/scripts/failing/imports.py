"""Modules that are missing, hidden, or built for something else."""

from __future__ import annotations

import ctypes
import importlib

from .parts import every, one, script


@one(1, "HF211", says="flash_attn")
def module_missing_on_one_rank() -> None:
    importlib.import_module("flash_attn")


@every("0 1", "HF211", says="mpi4py")
def module_missing_everywhere() -> None:
    importlib.import_module("mpi4py")


@every("0 1", "HF211", says="OrderedDictionary")
def name_missing_in_a_module() -> None:
    from collections import OrderedDictionary  # type: ignore[attr-defined] # noqa: F401


@one(1, "HF212", says="CXXABI")
def c_plus_plus_library_too_old() -> None:
    raise ImportError(
        "/lib/x86_64-linux-gnu/libstdc++.so.6: version `CXXABI_1.3.15' not found (required by "
        "/opt/conda/lib/python3.11/site-packages/scipy/spatial/_ckdtree.cpython-311-x86_64-linux-gnu.so)"
    )


@one(0, "HF212", says="GLIBC")
def c_library_too_old() -> None:
    raise OSError("/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by ./libaio.so.1)")


@one(1, "HF212", says="undefined symbol")
def symbol_undefined() -> None:
    raise ImportError(
        "/usr/lib/python3.11/site-packages/selective_scan_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    )


@one(1, "HF212", says="libnvinfer.so.8")
def library_missing() -> None:
    ctypes.CDLL("libnvinfer.so.8")


@one(1, "HF212", says="numpy.dtype size changed")
def numpy_of_another_size() -> None:
    raise ValueError(
        "numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject"
    )


@one(1, "HF212 HF219")
def no_code_for_this_gpu() -> None:
    raise RuntimeError(
        "CUDA error: no kernel image is available for execution on the device\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )


@one(1, "HF212")
def version_of_a_package() -> None:
    raise ImportError(
        "huggingface-hub>=0.34.0,<1.0 is required for a normal functioning of this module, but found "
        "huggingface-hub==0.26.1.\nTry: `pip install transformers -U`"
    )


script(
    "own-file-hides-torch",
    "0 1",
    "HF211",
    says="torch.py",
    files={"torch.py": "print('my notes on torch')\n", "train.py": "import torch\nmodel = torch.nn.Linear(2, 2)\n"},
)
script(
    "own-file-hides-a-module-of-python",
    "0 1",
    "HF211",
    says="random.py",
    files={"random.py": "seed = 3\n", "train.py": "import random\nprint(random.shuffle([1, 2]))\n"},
)
script(
    "modules-import-each-other",
    "0 1",
    "HF211 HF201",
    says="circular import",
    files={
        "model.py": "from loss import loss\n\ndef build():\n    return loss\n",
        "loss.py": "from model import build\n\ndef loss():\n    return build\n",
        "train.py": "from model import build\nbuild()\n",
    },
)
script("syntax", "0 1", "HF201", says="SyntaxError", files={"train.py": "def main()\n    print('hello')\n"})
