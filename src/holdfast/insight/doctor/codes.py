"""What each code of `holdfast doctor` means: cause, evidence and fix. `holdfast explain HF5xx` reads this table. PURE."""

from __future__ import annotations

from typing import NamedTuple


class Explained(NamedTuple):
    cause: str
    evidence: str
    fix: str


CODES: dict[str, Explained] = {
    "HF500": Explained(
        "The Python that runs holdfast is older than 3.11, or is not the one that the workers get.",
        "sys.version_info, and the program that PYTHON_EXEC names.",
        "Install Python 3.11 or newer and holdfast with it; unset PYTHON_EXEC where it points elsewhere by mistake.",
    ),
    "HF501": Explained(
        "torch cannot be imported by the Python that the workers get: it is not installed, its import fails, or takes "
        "so long that it may hang (a slow or dead network file system).",
        "A process of its own imports torch, bounded in time; its last line of stderr is shown.",
        "Install torch into this environment; for a broken import reinstall it; for a slow one put the environment on a local disk.",
    ),
    "HF502": Explained(
        "This torch was built without torch.distributed, or without gloo.",
        "torch.distributed.is_available() and is_gloo_available().",
        "Install an official build of torch.",
    ),
    "HF503": Explained(
        "There are GPUs that torch cannot use: a CPU build of torch, a driver older than the CUDA that torch was built with, "
        "a GPU whose architecture this build has no code for, or devices that this container may not open.",
        "NVIDIA's driver in /proc or nvidia-smi on one side, torch.cuda on the other.",
        "Install the torch build for this driver's CUDA (or a newer driver); in a container use --gpus all; look at CUDA_VISIBLE_DEVICES.",
    ),
    "HF504": Explained(
        "A GPU has uncorrected memory errors, or the driver cannot talk to it. Results may be wrong and jobs will die with Xid errors.",
        "nvidia-smi's volatile uncorrected ECC errors; nvidia-smi's own failure.",
        "Reset or drain the node, and have the GPU looked at; `dmesg | grep -i xid` tells more.",
    ),
    "HF505": Explained(
        "Somebody uses a GPU already: another job, or a worker that outlived its launcher. The next job may run out of GPU memory.",
        "Memory in use and compute processes, by nvidia-smi.",
        "Wait for that job, or end the processes named; pick other GPUs with CUDA_VISIBLE_DEVICES.",
    ),
    "HF510": Explained(
        "/dev/shm is small, full or not writable. Data-loader workers hand over batches there and NCCL its buffers; containers get 64 MiB by default. "
        "Too little shows as a bus error or as `unable to open shared memory object`.",
        "Size and free space of /dev/shm, and a file written there.",
        "docker run --shm-size=16g (or --ipc=host); on Kubernetes an emptyDir with medium: Memory at /dev/shm; remove what dead jobs left there.",
    ),
    "HF511": Explained(
        "Few open files are allowed. Data loaders, sockets between ranks and the store take a descriptor each: `Too many open files`.",
        "The soft limit RLIMIT_NOFILE.",
        "ulimit -n 65536 before the start, LimitNOFILE= in a systemd unit, --ulimit nofile=65536 in docker.",
    ),
    "HF512": Explained(
        "Few processes or threads are allowed, by ulimit or by cgroup: `can't start new thread`, `Resource temporarily unavailable`.",
        "RLIMIT_NPROC, and pids.max against pids.current of the cgroups above.",
        "Raise ulimit -u, docker's --pids-limit or the pod's limit.",
    ),
    "HF513": Explained(
        "Memory may not be locked, but there is InfiniBand or RoCE: NCCL cannot register buffers and fails, or falls back to sockets.",
        "RLIMIT_MEMLOCK and /sys/class/infiniband.",
        "ulimit -l unlimited; --ulimit memlock=-1 in docker; LimitMEMLOCK=infinity for slurmd.",
    ),
    "HF514": Explained(
        "Core dumps of workers would be written into the working folder, as large as their memory.",
        "RLIMIT_CORE and /proc/sys/kernel/core_pattern.",
        "ulimit -c 0, unless the dump is what you are after.",
    ),
    "HF515": Explained(
        "Little memory is left on this machine or in this cgroup. The kernel's out-of-memory killer ends workers with SIGKILL (exit code 137).",
        "MemAvailable, and the lowest memory limit of the cgroups above against what the machine has.",
        "End what uses it, raise the container's limit, use fewer data-loader workers.",
    ),
    "HF516": Explained(
        "There are fewer CPUs to use than workers, by affinity or by a cgroup's quota. Workers take turns, and every collective waits for the slowest.",
        "CPUs of the machine, of the affinity mask, and cpu.max.",
        "Raise --cpus-per-task, the pod's CPU request or the quota, or start fewer workers.",
    ),
    "HF517": Explained(
        "The kernel never overcommits memory (vm.overcommit_memory=2): forking a process that has much memory reserved fails, and CUDA reserves a lot.",
        "/proc/sys/vm/overcommit_memory.",
        "sysctl vm.overcommit_memory=0.",
    ),
    "HF518": Explained(
        "Processes may not look into each other (ptrace): py-spy cannot show native stacks of a worker that hangs. Python stacks do not need it.",
        "/proc/sys/kernel/yama/ptrace_scope and the capability CAP_SYS_PTRACE.",
        "sysctl kernel.yama.ptrace_scope=1 and run as root, or docker run --cap-add SYS_PTRACE.",
    ),
    "HF519": Explained(
        "The folder for logs or for temporary files cannot be written, is nearly full, or gives no answer.",
        "A file written there, and the free space of its file system.",
        "Make room, or name another folder with --log-dir or TMPDIR.",
    ),
    "HF521": Explained(
        "OMP_NUM_THREADS makes more threads than there are CPUs for all workers together, or is no number. They take turns and everything slows down.",
        "OMP_NUM_THREADS times the workers of this node, against the CPUs that may be used.",
        "Unset it: holdfast gives each worker its share of the CPUs.",
    ),
    "HF530": Explained(
        "The clock is not kept by NTP. Training does not mind; logs of several nodes cannot be put in order, tokens and certificates may be refused.",
        "adjtimex: the kernel's own flag.",
        "Start chronyd or systemd-timesyncd (on the host, where this is a container).",
    ),
    "HF531": Explained(
        "This machine's own host name does not resolve, or only slowly. gloo asks for it and takes loopback otherwise, so that other nodes cannot reach it.",
        "getaddrinfo of gethostname().",
        "Write the name with its real address into /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME to the interface that reaches the others.",
    ),
    "HF532": Explained(
        "This machine's own host name resolves to a loopback address (Debian and Ubuntu write 127.0.1.1 into /etc/hosts). gloo announces that address to the "
        "other nodes, and they hang in init_process_group or fail with `connect ... 127.0.1.1 refused`.",
        "getaddrinfo of gethostname().",
        "Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that reaches the others, or give the name its real address in /etc/hosts.",
    ),
    "HF534": Explained(
        "No network interface but loopback is up and has an address. Other nodes cannot be reached.",
        "The interfaces of this machine or container.",
        "Start the network; in a container use --network host or a network that the other nodes are in.",
    ),
    "HF535": Explained(
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that is not here or is down, or one that no other node can reach (loopback, docker's bridge).",
        "The variables against the interfaces of this machine, by NCCL's rules (prefixes, `=exact`, `^not`).",
        "Set both to the interface that reaches the others, or unset them.",
    ),
    "HF536": Explained(
        "There are several interfaces, some of them bridges of containers or virtual machines, and nothing says which to take. NCCL and gloo may choose one that "
        "leads nowhere: a hang in init_process_group or NCCL's `unhandled system error`.",
        "Names, states and addresses of the interfaces; the default route.",
        "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one that is proposed.",
    ),
    "HF537": Explained(
        "The endpoint's port is one that the kernel hands to outgoing connections, so that any program may hold it by chance when the job starts; or there are few "
        "such ports for the connections between ranks.",
        "/proc/sys/net/ipv4/ip_local_port_range.",
        "Take a port outside of it (29400 is the default), or widen the range.",
    ),
    "HF538": Explained(
        "Another process listens at the endpoint's port on this machine: an old job, or another user's.",
        "/proc/net/tcp, and the process that holds the socket.",
        "End it, or take another port on all nodes.",
    ),
    "HF539": Explained(
        "A variable is set that slows training down, fills the disk, or comes from another launcher.",
        "The environment of this shell; workers inherit it.",
        "Unset what is named.",
    ),
    "HF550": Explained(
        "Fewer nodes came to the meeting point than --nnodes says: not started, started with another --rdzv-id, or unable to reach the endpoint.",
        "Which nodes came within --timeout.",
        "Run the same line on all nodes at the same time; look at what doctor says on those that are missing.",
    ),
    "HF551": Explained(
        "The meeting point cannot be reached: its name does not resolve here, nobody listens there, or a firewall drops the packets.",
        "What became of the last attempt to connect.",
        "`refused`: start doctor on the node that owns the endpoint. `no answer`: open the port in firewalls and security groups. "
        "`does not resolve`: use an address, or mend DNS.",
    ),
    "HF552": Explained(
        "The meeting point refuses this node: another --rdzv-id, --nnodes or job token, or another version of holdfast.",
        "The refusal, which names both sides' values.",
        "Run the same line with the same holdfast on all nodes.",
    ),
    "HF553": Explained(
        "Something else than a doctor listens at the endpoint: a running job, or another service.",
        "Its first words.",
        "Wait for the job to end, or take another port on all nodes.",
    ),
    "HF554": Explained(
        "A node came and fell silent before it had reported: it died, its network did, or its checks did not end in time.",
        "The connection to it closed, or --timeout passed.",
        "Look at what doctor said there; a longer --timeout helps where only time was short.",
    ),
    "HF560": Explained(
        "One node cannot open a connection to another. Ranks connect to each other on ports that the kernel picks, so a firewall that opens only the endpoint's port "
        "makes init_process_group hang until its time-out.",
        "A connection from each node to each other, on a port that the kernel picked, both ways.",
        "Open all TCP ports between the nodes (a security group that allows itself, iptables, NetworkPolicy).",
    ),
    "HF561": Explained(
        "A node's host name does not resolve on another node, or to an address that is not that node's. Scripts and libraries that pass names around fail.",
        "getaddrinfo of each host name on each node.",
        "Use addresses for MASTER_ADDR and the endpoint (holdfast does), or mend DNS and /etc/hosts.",
    ),
    "HF563": Explained(
        "A round trip takes long. Collectives of small tensors take at least that long each.",
        "The median of some round trips of one small packet over TCP.",
        "Place the nodes closer to each other: the same zone, placement group or rack.",
    ),
    "HF564": Explained(
        "A connection is slow, by itself or against those of its peers. An all-reduce is as slow as its slowest link.",
        "The bandwidth of one TCP connection, for half a second at most. Several connections, or InfiniBand, may give more.",
        "Look for a cable or port that fell back to a lower speed (ethtool), wrong MTU, or traffic of others.",
    ),
    "HF565": Explained(
        "Two nodes' clocks differ. Training does not mind; logs cannot be put in order.",
        "Cristian's method: the other's time in the middle of the shortest round trip.",
        "Start chronyd or systemd-timesyncd on all nodes.",
    ),
    "HF566": Explained(
        "Nodes have different versions of Python or of holdfast. Pickled objects may not travel between ranks.",
        "What each node says of itself.",
        "Install the same environment, or container image, on all nodes.",
    ),
    "HF567": Explained(
        "Nodes have different versions of torch, CUDA or NCCL. Ranks may hang or fail with `invalid usage`, or give results that differ.",
        "What torch says of itself on each node.",
        "Install the same torch on all nodes.",
    ),
    "HF570": Explained(
        "All pairs of nodes reach each other, but an all-reduce with gloo failed or hung: gloo chose another interface or address than the one that works.",
        "One process per node joined a gloo group and reduced a megabyte, bounded in time.",
        "Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every node as proposed, and run doctor again.",
    ),
}
"""By code. A code is never reused for something else."""
