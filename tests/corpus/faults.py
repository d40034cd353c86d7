"""Training scripts that fail, one kind of fault each: what record.py runs to learn how real failures look.

Each body runs on three ranks with gloo, after COMMON: RANK and `meet()` (an all_reduce in which everybody waits) are
there. `hosts` says which rank is pretended to be where.
"""

from __future__ import annotations

COMMON = """
import os, sys, time, signal, datetime
import torch, torch.distributed as dist
RANK = int(os.environ["RANK"])
def group(seconds=30):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
def meet():
    dist.all_reduce(torch.ones(2))
def steps():
    for step in range(3000):
        meet()
        time.sleep(0.01)
"""

MEETING = "group()\nmeet()\n"
MODEL = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
group()
"""

# name: (script after COMMON, culprit ranks, code)
FAULTS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "value_error": (MEETING + "if RANK == 1: raise ValueError('the batch is empty')\nsteps()", (1,), "HF201"),
    "key_error_with_slow_end": (
        MEETING
        + """
if RANK == 1:
    def slowly(*what):
        sys.__excepthook__(*what)
        dist.destroy_process_group()
        time.sleep(3)
    sys.excepthook = slowly
    raise KeyError("tokens")
steps()""",
        (1,),
        "HF201",
    ),
    "assertion": (MEETING + "if RANK == 2: assert RANK < 2, 'labels out of range'\nsteps()", (2,), "HF201"),
    "killed": (MEETING + "if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\nsteps()", (1,), "HF204"),
    "silent_exit": (MEETING + "if RANK == 2: os._exit(3)\nsteps()", (2,), "HF205"),
    "segfault": (MEETING + "import ctypes\nif RANK == 1: ctypes.string_at(0)\nsteps()", (1,), "HF223"),
    "native_abort": (
        MEETING + "import ctypes\nif RANK == 1: ctypes.CDLL(None).free(ctypes.c_void_p(4711))\nsteps()",
        (1,),
        "HF223",
    ),
    "illegal_instruction": (MEETING + "if RANK == 1: os.kill(os.getpid(), signal.SIGILL)\nsteps()", (1,), "HF223"),
    "sigterm_from_outside": (MEETING + "if RANK == 1: os.kill(os.getpid(), signal.SIGTERM)\nsteps()", (1,), "HF235"),
    "keyboard_interrupt": (MEETING + "if RANK == 0: os.kill(os.getpid(), signal.SIGINT)\nsteps()", (0,), "HF235"),
    "bus_error": (
        MEETING
        + """
import mmap, ctypes
if RANK == 1:
    file = open('/dev/shm/corpus_bus', 'w+b'); os.unlink('/dev/shm/corpus_bus'); file.truncate(8192)
    view = mmap.mmap(file.fileno(), 8192); file.truncate(0); view[4096] = 1
steps()""",
        (1,),
        "HF216",
    ),
    "a_rank_sleeps": (
        "group(4)\nmeet()\nif RANK == 1: time.sleep(40)\nsteps()",
        (0, 2),
        "HF209",
    ),
    "monitored_barrier": (
        MEETING + "if RANK != 1: dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))\ntime.sleep(30)",
        (0, 2),
        "HF209",
    ),
    "collectives_differ": (
        (
            "dist.set_debug_level(dist.DebugLevel.DETAIL)\ngroup(10)\nx = torch.ones(2)\n"
            "dist.all_reduce(x) if RANK else dist.broadcast(x, 0)\nsteps()"
        ),
        (0, 1, 2),
        "HF225",
    ),
    "sizes_differ": (
        "dist.set_debug_level(dist.DebugLevel.DETAIL)\ngroup(10)\ndist.all_reduce(torch.ones(2 + RANK))\nsteps()",
        (0, 1, 2),
        "HF225",
    ),
    "models_differ": (
        MODEL + "DDP(nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + RANK)]))\nsteps()",
        (0, 1, 2),
        "HF227",
    ),
    "shapes_differ": (MODEL + "DDP(nn.Linear(4, 4 + RANK))\nsteps()", (0, 1, 2), "HF227"),
    "unused_parameters": (
        MODEL
        + """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.a(x)
model = DDP(Two())
for _ in range(3): model(torch.ones(2, 4)).sum().backward()
""",
        (0, 1, 2),
        "HF226",
    ),
    "loader_worker_killed": (
        MEETING
        + """
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 100
    def __getitem__(self, index):
        if RANK == 1 and index == 20: os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2)
for _ in DataLoader(Data(), num_workers=1): meet()
""",
        (1,),
        "HF215",
    ),
    "loader_worker_raises": (
        MEETING
        + """
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 100
    def __getitem__(self, index):
        if RANK == 2 and index == 9: open('/data/images/0009.png')
        return torch.ones(2)
for _ in DataLoader(Data(), num_workers=1): meet()
""",
        (2,),
        "HF217",
    ),
    "loader_worker_exits": (
        MEETING
        + """
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 100
    def __getitem__(self, index):
        if RANK == 0 and index == 9: os._exit(1)
        return torch.ones(2)
for _ in DataLoader(Data(), num_workers=1): meet()
""",
        (0,),
        "HF215",
    ),
    "missing_module": (MEETING + "if RANK == 1: import flash_attn\nsteps()", (1,), "HF211"),
    "missing_name": (MEETING + "if RANK == 1: from torch.utils.data import StatefulLoader\nsteps()", (1,), "HF211"),
    "missing_library": (
        MEETING + "import ctypes\nif RANK == 1: ctypes.CDLL('libcudart.so.12')\nsteps()",
        (1,),
        "HF212",
    ),
    "port_in_use": (
        """
import socket
if RANK == 0:
    held = socket.socket(); held.bind(("0.0.0.0", 0)); held.listen()
    dist.TCPStore("127.0.0.1", held.getsockname()[1], is_master=True)
time.sleep(20)
""",
        (0,),
        "HF213",
    ),
    "python_port_in_use": (
        """
import socket
if RANK == 1:
    held = socket.socket(); held.bind(("127.0.0.1", 0)); held.listen()
    socket.socket().bind(held.getsockname())
time.sleep(20)
""",
        (1,),
        "HF213",
    ),
    "disk_full": (MEETING + "if RANK == 0:\n  open('/dev/full', 'w').write('x' * 100000)\nsteps()", (0,), "HF214"),
    "torch_save_disk_full": (
        MEETING + "if RANK == 0: torch.save({'x': torch.ones(100000)}, '/dev/full')\nsteps()",
        (0,),
        "HF214",
    ),
    "file_too_large": (
        MEETING
        + "import resource\nif RANK == 0:\n  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        + "  open('big', 'wb').write(b'x' * 100000)\nsteps()",
        (0,),
        "HF214",
    ),
    "too_many_files": (
        MEETING
        + "import resource\nif RANK == 2:\n  resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        + "  kept = [open('/dev/null') for _ in range(100)]\nsteps()",
        (2,),
        "HF230",
    ),
    "host_memory_refused": (MEETING + "if RANK == 1: torch.empty(10**15)\nsteps()", (1,), "HF239"),
    "memory_error": (MEETING + "if RANK == 1: bytearray(10**17)\nsteps()", (1,), "HF239"),
    "file_missing": (MEETING + "if RANK == 1: open('/data/train.bin', 'rb')\nsteps()", (1,), "HF217"),
    "read_only": (MEETING + "if RANK == 1: open('/proc/sys/kernel/ostype', 'w')\nsteps()", (1,), "HF218"),
    "arguments": (
        """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.parse_args()
""",
        (0, 1, 2),
        "HF232",
    ),
    "launch_argument": (
        """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
parser.parse_args()
""",
        (0, 1, 2),
        "HF233",
    ),
    "nan_found": (
        MEETING
        + "if RANK == 1:\n  x = torch.zeros(2, requires_grad=True)\n  with torch.autograd.detect_anomaly():\n"
        + "    (0 * torch.sqrt(x)).sum().backward()\nsteps()",
        (1,),
        "HF228",
    ),
    "own_loss_guard": (
        MEETING + "if RANK == 2: raise FloatingPointError('loss is nan at step 120')\nsteps()",
        (2,),
        "HF228",
    ),
    "store_times_out": (
        """
if RANK:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "9"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    group(3)
time.sleep(30)
""",
        (1, 2),
        "HF224",
    ),
    "a_rank_never_comes": ("if RANK != 1: group(4)\ntime.sleep(30)", (0, 2), "HF224"),
    "no_cuda": ("torch.cuda.set_device(RANK)\ngroup()", (0, 1, 2), "HF219"),
    "nccl_without_cuda": ("dist.init_process_group('nccl')\nmeet()", (0, 1, 2), "HF219"),
    "state_does_not_fit": (
        MODEL + "if RANK == 1: nn.Linear(4, 4).load_state_dict(nn.Linear(4, 5).state_dict())\nsteps()",
        (1,),
        "HF237",
    ),
    "checkpoint_torn": (
        MODEL
        + """
if RANK == 1:
    torch.save(nn.Linear(400, 400).state_dict(), 'a.pt')
    raw = open('a.pt', 'rb').read()
    open('a.pt', 'wb').write(raw[:len(raw) // 2])
    torch.load('a.pt')
steps()""",
        (1,),
        "HF237",
    ),
    "leaves_early": (MEETING + "if RANK == 1: os._exit(0)\nsteps()", (0, 2), "HF229"),
    "download_refused": (
        MEETING + "import urllib.request\nif RANK == 1: urllib.request.urlopen('http://127.0.0.1:9/data')\nsteps()",
        (1,),
        "HF238",
    ),
    "wrapped_complaint": (
        MEETING
        + """
if RANK == 2: os.kill(os.getpid(), signal.SIGKILL)
try:
    steps()
except RuntimeError as error:
    raise ValueError("epoch 3 was not finished") from error
""",
        (2,),
        "HF204",
    ),
    "complaint_in_cleanup": (
        MEETING
        + """
try:
    if RANK == 1: raise IndexError("list index out of range")
    steps()
finally:
    if RANK == 1: dist.destroy_process_group()
    dist.all_reduce(torch.ones(1))
""",
        (1,),
        "HF201",
    ),
    "quotes_a_complaint": (
        MEETING + "if RANK == 1: raise RuntimeError('log says \"Connection closed by peer\"; cannot go on')\nsteps()",
        (1,),
        "HF201",
    ),
    "thread_cannot_start": (
        MEETING
        + """
if RANK == 1:
    import threading
    threading.stack_size(1 << 40)
    threading.Thread(target=print).start()
steps()""",
        (1,),
        "HF231",
    ),
    "exit_with_words": (MEETING + "if RANK == 1: sys.exit('no samples match the filter')\nsteps()", (1,), "HF205"),
    "index_error_in_embedding": (
        MEETING + "if RANK == 1: torch.nn.Embedding(4, 2)(torch.tensor([7]))\nsteps()",
        (1,),
        "HF201",
    ),
    "child_process_raises": (
        MEETING
        + """
if RANK == 1:
    import subprocess
    subprocess.run([sys.executable, '-c', 'raise SystemExit(4)'], check=True)
steps()""",
        (1,),
        "HF201",
    ),
}
