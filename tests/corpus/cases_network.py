"""Faults between nodes: NCCL, gloo, the store, lost nodes. Ranks 0 to 3 are on node a, 4 to 7 on node b."""

from __future__ import annotations

from tests.corpus.telling import (
    C10D,
    GLOO_CLOSED,
    GLOO_RESET,
    NCCL,
    NCCL_REMOTE,
    SITE,
    STORE_BROKEN,
    STORE_GONE,
    case,
    cut,
    fails,
    watchdog,
)

NETWORK = [
    case(
        "nccl_system_error",
        "HF208",
        (0, 4),
        fails(
            0,
            NCCL
            + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, malloc) or external library "
            "call failed or device error.\nLast error:\nsocketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
            frames=(C10D,),
        ),
        fails(
            4,
            NCCL
            + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call failed.\nLast error:\n"
            "socketStartConnect: Connect to 172.17.0.1<4521> failed : Software caused connection abort",
            frames=(C10D,),
            late=True,
        ),
    ),
    case(
        "no_interface",
        "HF208",
        4,
        fails(
            4,
            NCCL
            + "internal error - please report this issue to the NCCL developers, NCCL version 2.27.3\nncclInternalError: Internal check failed.\n"
            "Last error:\nBootstrap : no socket interface found",
            frames=(C10D,),
        ),
        cut(0, STORE_BROKEN),
    ),
    case(
        "gloo_interface",
        "HF208",
        2,
        fails(
            2,
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9",
        ),
    ),
    case(
        "gloo_hostname",
        "HF208",
        5,
        fails(
            5,
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:211] rv == 0. Unable to resolve hostname to a (local) address",
        ),
        cut(1, late=True),
    ),
    case(
        "watchdogs_everywhere",
        "HF209",
        tuple(range(8)),
        *(watchdog(rank, late=rank > 1) for rank in (3, 1, 0, 2, 4, 5)),
    ),
    case(
        "watchdogs_but_one_raised",
        "HF201",
        2,
        watchdog(0),
        watchdog(1),
        fails(2, "IndexError: list index out of range", late=True),
        watchdog(5, late=True),
        hard=True,
    ),
    case(
        "one_rank_behind",
        "HF209",
        6,
        watchdog(0),
        watchdog(1),
        watchdog(2),
        watchdog(6, seq=1570, enqueued=1570),
        watchdog(4),
        hard=True,
    ),
    case(
        "another_collective", "HF225", 3, watchdog(0), watchdog(1), watchdog(3, op="BROADCAST"), watchdog(4), hard=True
    ),
    case("all_cut", "HF210", (0, 5), cut(0, NCCL_REMOTE), cut(5, NCCL_REMOTE, late=True)),
    case(
        "timed_out_then_cut",
        "HF209",
        3,
        cut(0, GLOO_CLOSED),
        cut(1, GLOO_RESET),
        fails(
            3,
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
            "waiting 1800000ms for recv operation to complete",
            frames=(C10D,),
        ),
        hard=True,
    ),
    case(
        "store_wait",
        "HF224",
        (1, 4),
        fails(
            1,
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//7",
            frames=(C10D,),
        ),
        fails(
            4,
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//7",
            frames=(C10D,),
            late=True,
        ),
    ),
    case(
        "store_unreachable",
        "HF224",
        (4, 5),
        fails(
            4,
            "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node-a, 29500).",
            frames=(f"{SITE}/torch/distributed/rendezvous.py",),
        ),
        fails(
            5,
            "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node-a, 29500).",
            frames=(f"{SITE}/torch/distributed/rendezvous.py",),
        ),
    ),
    case(
        "gloo_full_mesh",
        "HF224",
        (0, 4),
        fails(
            0,
            "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
            frames=(C10D,),
        ),
        cut(4, late=True),
    ),
    case(
        "no_master",
        "HF224",
        0,
        fails(
            0,
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set",
        ),
    ),
    case("finished_early", "HF229", (0, 1), cut(0), cut(1, late=True), done=(5,)),
    case("node_lost", "HF306", (), cut(0, NCCL_REMOTE), cut(3, STORE_GONE, late=True), lost=("b (connection closed)",)),
    case(
        "node_lost_abort",
        "HF306",
        (),
        watchdog(2),
        cut(1, STORE_BROKEN),
        lost=("b (silent for more than 6 s)",),
        hard=True,
    ),
    case(
        "node_lost_late_noise",
        "HF306",
        (),
        cut(1),
        fails(2, "AttributeError: 'NoneType' object has no attribute 'close'", late=True),
        lost=("b (connection closed)",),
        hard=True,
    ),
]
