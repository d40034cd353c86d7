"""Faults of scripts, and the hard ones: victims that are faster, louder or many. Ranks 0 to 3 are on node a, 4 to 7 on b."""

from __future__ import annotations

from tests.corpus.telling import (
    C10D,
    GLOO_CLOSED,
    GLOO_RESET,
    NCCL_REMOTE,
    OOM,
    SITE,
    STORE_BROKEN,
    STORE_GONE,
    TRAIN,
    case,
    cut,
    fails,
    watchdog,
)

SEGFAULT = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f0 (most recent call first):\n  File "/data/job/train.py", line 9 in step\n'

SCRIPT = [
    case(
        "state_dict",
        "HF237",
        (0, 1),
        fails(
            0,
            "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for wte.weight: copying a param with shape torch.Size([50257, 768]) from "
            "checkpoint, the shape in current model is torch.Size([50304, 768]).",
        ),
    ),
    case(
        "torn_safetensors",
        "HF237",
        3,
        fails(3, "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    ),
    case(
        "ddp_params",
        "HF227",
        2,
        fails(
            2,
            "RuntimeError: DDP expects same model across all ranks, but Rank 2 has 4 params, while rank 0 has inconsistent 6 params.",
            frames=(C10D,),
        ),
        cut(0),
    ),
    case(
        "gloo_sizes",
        "HF225",
        (0, 1),
        fails(
            1,
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 8",
            frames=(C10D,),
        ),
        cut(0),
    ),
    case(
        "fingerprints",
        "HF225",
        (0, 1),
        fails(
            0,
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=7, "
            "OpType=ALLREDUCE, TensorShape=[2]), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=BARRIER).",
            frames=(C10D,),
        ),
    ),
    case(
        "nan_guard",
        "HF228",
        6,
        fails(6, "ValueError: Loss is NaN at iteration 4500, stopping training", line="raise ValueError(text)"),
        cut(2),
    ),
    case(
        "distribution_nan",
        "HF228",
        1,
        fails(
            1,
            "ValueError: Expected parameter logits (Tensor of shape (4, 9)) of distribution Categorical to satisfy the constraint IndependentConstraint(Real(), 1), "
            "but found invalid values:\ntensor([[nan, nan]], device='cuda:1')",
        ),
    ),
    case(
        "loss_differs",
        "HF236",
        0,
        fails(
            0,
            "RuntimeError: loss differs between ranks: 1.24, 1.31: replicas are out of sync",
            line="raise RuntimeError(text)",
        ),
    ),
    case(
        "launch_style",
        "HF233",
        (0, 1),
        fails(
            1,
            code=2,
            stderr="usage: train.py [-h] --local_rank LOCAL_RANK\ntrain.py: error: the following arguments are required: --local_rank\n",
        ),
    ),
    case(
        "click_usage",
        "HF232",
        0,
        fails(
            0,
            code=2,
            stderr="Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --epoch (Possible options: --epochs)\n",
        ),
    ),
    case("syntax", "HF201", 4, fails(4, "SyntaxError: invalid syntax (train.py, line 12)")),
    case(
        "hub_refused",
        "HF238",
        3,
        fails(
            3,
            "requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url\"), 'Connection "
            "reset by peer')",
            frames=(f"{SITE}/requests/adapters.py",),
            after="ConnectionResetError: [Errno 104] Connection reset by peer",
        ),
        cut(0),
    ),
    case(
        "s3_reset",
        "HF238",
        5,
        fails(
            5,
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            frames=(f"{SITE}/urllib3/response.py", "/usr/lib/python3.11/ssl.py"),
        ),
        cut(1, NCCL_REMOTE),
        hard=True,
    ),
    case(
        "time_limit",
        "HF235",
        0,
        fails(
            0,
            code=-15,
            stderr="slurmstepd: error: *** JOB 4711 ON node-a CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***\n",
        ),
    ),
    case(
        "save_deadlock",
        "HF234",
        1,
        fails(
            1,
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
            frames=(C10D,),
            stderr="UserWarning: Rank 0 alone called torch.save, and the others ran ahead\n",
        ),
    ),
    case("native_crash", "HF223", 6, fails(6, code=-11, stderr=SEGFAULT), cut(0), cut(1)),
    case(
        "heap",
        "HF223",
        2,
        fails(
            2, code=-6, stderr="malloc(): invalid size (unsorted)\n" + SEGFAULT.replace("Segmentation fault", "Aborted")
        ),
        cut(3),
    ),
    case(
        "shell_child_killed",
        "HF204",
        3,
        fails(3, code=137, stderr="run.sh: line 4: 77 Killed                  python train.py\n"),
    ),
    case("shell_not_found", "HF205", 3, fails(3, code=127, stderr="run.sh: line 4: pyhton: command not found\n")),
]

HARD = [
    case("victim_first", "HF207", 4, cut(0, NCCL_REMOTE), cut(1, STORE_GONE), fails(4, OOM), hard=True),
    case("victims_abort", "HF205", 5, watchdog(0), watchdog(1), fails(5, code=7), hard=True),
    case(
        "two_independent",
        "HF217",
        3,
        fails(3, "FileNotFoundError: [Errno 2] No such file or directory: 'a.bin'"),
        fails(6, OOM),
        cut(0),
        hard=True,
    ),
    case(
        "late_culprit",
        "HF201",
        6,
        cut(0),
        cut(1, late=True),
        fails(6, "KeyError: 'input_ids'", code=-15, late=True),
        hard=True,
    ),
    case(
        "stopped_handler",
        "HF210",
        0,
        cut(0),
        fails(3, "RuntimeError: received SIGTERM, saving and leaving", late=True, line="raise RuntimeError(text)"),
        hard=True,
    ),
    case(
        "loader_of_the_stop",
        "HF210",
        1,
        cut(1),
        fails(2, "RuntimeError: DataLoader worker (pid 9) is killed by signal: Terminated. ", late=True),
        hard=True,
    ),
    case(
        "quoted_in_value_error",
        "HF201",
        2,
        cut(0),
        fails(2, f"ValueError: cannot parse log line: {GLOO_CLOSED!r}", line="raise ValueError(text)"),
        hard=True,
    ),
    case(
        "quoted_by_user",
        "HF201",
        2,
        cut(5, NCCL_REMOTE),
        fails(2, "RuntimeError: the report says: connection closed by peer", line="raise RuntimeError(text)"),
        hard=True,
    ),
    case(
        "wrapped_victim",
        "HF204",
        7,
        fails(0, "RuntimeError: epoch 3 failed", after=GLOO_CLOSED, frames=(C10D,)),
        fails(7, code=-9),
        hard=True,
    ),
    case(
        "fault_then_cleanup",
        "HF201",
        1,
        cut(4),
        fails(1, GLOO_RESET, after="ZeroDivisionError: division by zero"),
        hard=True,
    ),
    case(
        "logged_and_left",
        "HF207",
        6,
        fails(
            0,
            code=1,
            stderr=f'ERROR training failed\nTraceback (most recent call last):\n  File "{TRAIN}", line 3, in <module>\n    step()\n'
            f'  File "{C10D}", line 9, in wait\n    work.wait()\n{GLOO_CLOSED}\n',
        ),
        fails(6, OOM),
        hard=True,
    ),
    case(
        "python_socket_victim",
        "HF201",
        2,
        fails(0, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        fails(2, "TypeError: forward() missing 1 required positional argument: 'mask'"),
        hard=True,
    ),
    case(
        "deepspeed_victim",
        "HF239",
        4,
        fails(1, STORE_BROKEN, frames=(f"{SITE}/deepspeed/comm/torch.py", C10D)),
        fails(4, "MemoryError"),
        hard=True,
    ),
    case(
        "aborted_communicator",
        "HF201",
        3,
        fails(
            0,
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0. Original reason for failure was: [Rank 0] Watchdog caught "
            "collective operation timeout",
            frames=(C10D,),
        ),
        fails(3, "AssertionError: vocabulary differs from the tokenizer's"),
        hard=True,
    ),
    case(
        "sigabrt_collateral",
        "HF204",
        5,
        fails(
            1,
            code=-6,
            stderr="terminate called after throwing an instance of 'gloo::IoException'\n  what():  [/pytorch/third_party/gloo/gloo/transport/tcp/"
            "pair.cc:553] Connection closed by peer [10.0.0.2]:4711\n",
        ),
        fails(5, code=-9),
        hard=True,
    ),
    case("silent_abort", "HF205", 3, fails(0, code=-6), fails(3, code=3), hard=True),
    case(
        "inductor_headers",
        "HF212",
        (5, 6),
        *(
            fails(
                rank,
                "torch._inductor.exc.InductorError: CppCompileError: C++ compile error\n\nCommand:\ng++ /tmp/torchinductor_u/x.main.cpp -I/usr/include/"
                "python3.11\n\nOutput:\nfatal error: Python.h: No such file or directory",
            )
            for rank in (5, 6)
        ),
    ),
    case(
        "no_triton",
        "HF212",
        0,
        fails(
            0,
            "torch._inductor.exc.TritonMissing: Cannot find a working triton installation. Either the package is not installed or it is too old.",
        ),
    ),
    case(
        "libgl",
        "HF212",
        2,
        fails(2, "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"),
    ),
    case(
        "gated_model",
        "HF238",
        0,
        fails(
            0,
            "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/meta-llama/Llama-3-8B.\n401 Client Error.",
        ),
    ),
    case("no_hip", "HF219", 4, fails(4, "RuntimeError: No HIP GPUs are available")),
]
