"""What each verdict's code means: its name, what happens, what holdfast saw to say so, and how to mend it.

Pure. `holdfast explain` prints it, docs/errors.md is made of it. How the causes are recognised is in rules.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    name: str
    """A few words, for a table."""
    cause: str
    evidence: str
    fix: str


WORDS = "The worker's last exception (its error file, or the traceback on its stderr)"

TEXTS: dict[str, Text] = {
    "HF200": Text(
        "ended although no worker failed",
        "The workers were stopped for a reason that is not theirs: the store's host died, nodes came and went, or whatever failed did so "
        "after the stop had begun.",
        "No worker had ended with anything but 0 when the generation was stopped.",
        "events.jsonl in the run folder of the coordinator's node says why it was stopped: `holdfast report`.",
    ),
    "HF201": Text(
        "a worker raised an exception",
        "An exception left the script, of a kind that has no code of its own.",
        f"{WORDS}; it was the first that does not speak of its peers.",
        "Read the traceback: it is the last thing on the screen, and in verdict.json.",
    ),
    "HF202": Text(
        "the program could not be started",
        "The interpreter or program is not there, may not be executed, or is for another machine.",
        "execve's own answer; exit code 127 where it does not exist, else 126.",
        "Check its path on that node and its x bit; with --no-python the first line (#!) of a script.",
    ),
    "HF203": Text(
        "killed by the kernel's out-of-memory killer",
        "The machine, or the cgroup that the job runs in, had no memory left and the kernel killed the largest process.",
        "The worker ended by SIGKILL and the kernel's counter of such kills in its cgroup (oom_kill) had grown.",
        "Fewer data-loader workers, a smaller batch, memory-mapped data; or a larger limit (docker -m, Kubernetes limits.memory, --mem of Slurm).",
    ),
    "HF204": Text(
        "ended by a signal",
        "Something outside sent it a signal that ends a process, most often SIGKILL: a person, a scheduler, or an out-of-memory killer that "
        "holdfast may not see from inside a container.",
        "waitpid's status of the worker; no words of its own.",
        "dmesg and the scheduler's log say who sent it; watch memory (free -m, memory.events) as the job runs.",
    ),
    "HF205": Text(
        "ended with an exit code",
        "The program called exit() or a shell in between passed on a failure; there was no exception to record.",
        "waitpid's status of the worker, and no traceback on its stderr.",
        "Its last lines on stderr, and the program's own documentation of exit codes; 126 and 127 mean that a shell cannot run a command.",
    ),
    "HF207": Text(
        "out of GPU memory",
        "The allocator found no room on the GPU: the model, its activations or fragments of both fill it, or another process uses it too.",
        f"{WORDS} says `out of memory` of CUDA, HIP, cuBLAS or cuDNN.",
        "A smaller micro-batch with more accumulation, activation checkpointing, FSDP, bf16; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "against fragmentation; nvidia-smi for processes that should not be there (workers that outlived another launcher).",
    ),
    "HF208": Text(
        "a network or system error under the collectives",
        "NCCL or gloo could not make a connection or a system call: a wrong interface (docker0, a VPN, IPv6 link-local), a firewall, a node "
        "that cannot be reached, a broken InfiniBand port.",
        f"{WORDS} says `unhandled system error`, `ncclSystemError`, `no socket interface found` or why a connection failed, and no other "
        "rank had a reason of its own. The interfaces of that node are added.",
        "NCCL_DEBUG=INFO (NCCL_DEBUG_SUBSYS=INIT,NET) shows the failing call. Name the interface that all nodes share: NCCL_SOCKET_IFNAME=eth0, "
        "GLOO_SOCKET_IFNAME=eth0. NCCL_IB_DISABLE=1 tells whether InfiniBand is the trouble. `holdfast doctor` tests every pair.",
    ),
    "HF209": Text(
        "a collective timed out",
        "Ranks waited in a collective for somebody who did not come within the group's time-out: a branch that only some ranks take, one rank "
        "that loads, evaluates or saves for longer than that, or a network that swallows packets.",
        "NCCL's watchdog, gloo or the store says `timed out`, and no rank had a reason of its own. Where the watchdogs' numbers differ the rank "
        "that is behind is named; where the stacks of the others, taken before they were stopped, show one elsewhere, that one.",
        "`holdfast stacks` while it hangs shows which rank is elsewhere; holdfast does the same by itself before a restart. Take collectives out of "
        "`if rank == 0:`, or give timeout= to init_process_group.",
    ),
    "HF210": Text(
        "a connection to a peer was lost",
        "Ranks say that a peer went away, but no peer said why: its process vanished without a trace, its machine did, or the network between "
        "them cut connections (idle time-outs of firewalls, a flapping link).",
        "All failures of the generation are complaints about connections.",
        "The other ranks' logs, dmesg and the scheduler's log on the other nodes; then the network: `holdfast doctor` on all nodes.",
    ),
    "HF211": Text(
        "a module is missing",
        "The script imports what is not installed in this Python, or a file of its own hides a library of the same name.",
        "ModuleNotFoundError or ImportError left the script; or what it says of a module, and a file beside the script that has that module's name. "
        "Where only some nodes report it both sides are named.",
        "Install it on the nodes named, with the same Python (python -m pip install …); better: one environment that all nodes mount, or one container image. "
        "A file that hides a library needs another name.",
    ),
    "HF212": Text(
        "a library does not fit, is missing, or cannot be compiled",
        "A compiled extension was built for another CUDA, torch, numpy, compiler or glibc than is installed there; a package wants another version of one "
        "that it uses; or a library that it needs is not "
        "on the machine; or what torch.compile makes could not be compiled.",
        f"{WORDS} says `undefined symbol`, `cannot open shared object file`, `GLIBC_… not found`, that numpy's layout differs, or that a compiler failed.",
        "Reinstall the package that is named into this environment (pip install --force-reinstall --no-cache-dir); ldd on the library shows what is missing; "
        "LD_LIBRARY_PATH may point at another CUDA. For torch.compile: a C++ compiler, Python's headers, and torch's own triton.",
    ),
    "HF213": Text(
        "a port is taken",
        "The script, or a library in it, binds a port that some process on that machine holds already: an earlier job that did not end, or "
        "several ranks that bind the same fixed port.",
        f"{WORDS} says EADDRINUSE. Who holds the port is added where it can be seen.",
        "Do not set MASTER_PORT in the script: holdfast gives every generation a fresh one. For ports of your own add LOCAL_RANK, or bind port 0.",
    ),
    "HF214": Text(
        "a disk is full",
        "No space or no inodes are left, a quota is used up, or the file exceeds a limit.",
        f"{WORDS} says ENOSPC, EDQUOT or EFBIG, or torch's writer stopped in the middle of a file. How full that node's disks are is added.",
        "df -h, df -i and quota -s on that node; move caches (HF_HOME, TORCHINDUCTOR_CACHE_DIR, TMPDIR); delete old checkpoints "
        "(`holdfast snaps prune`). holdfast's own snapshots stay whole: an unfinished one is never used.",
    ),
    "HF215": Text(
        "a data-loader worker died",
        "A process of the DataLoader was killed or crashed; the training process only learns that it is gone.",
        f"{WORDS} is the DataLoader's: `worker (pid …) is killed by signal`, `exited unexpectedly`, `timed out`.",
        "`Killed`: memory (fewer num_workers, smaller prefetch_factor, no large Python lists in the dataset). `Segmentation fault`: an image or video library. "
        "num_workers=0 shows the error in place.",
    ),
    "HF216": Text(
        "shared memory is used up",
        "/dev/shm is full. Data loaders hand over batches in it and NCCL has its buffers there; containers get 64 MiB unless told otherwise.",
        "SIGBUS where /dev/shm has little room, or words such as `unable to open shared memory object`, `insufficient shared memory (shm)`, ENOSPC on a file in /dev/shm. "
        "The size and free space of /dev/shm on that node are added.",
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm; remove what dead jobs left "
        "there; fewer loader workers.",
    ),
    "HF217": Text(
        "a file is missing, or its file system fails",
        "A path that the script opens does not exist on that node, or its mount does not answer properly.",
        "FileNotFoundError and its like, or ESTALE, EIO, ENOTCONN. Where only some nodes report it both sides are named.",
        "Put the data where all nodes see it under the same path; create output folders on every node (os.makedirs(…, exist_ok=True)); "
        "use absolute paths.",
    ),
    "HF218": Text(
        "permission denied",
        "The user who runs the job may not read, write or do that there.",
        "PermissionError, EACCES, EPERM or EROFS.",
        "ls -ld on the path and its folders, id, mount | grep ro; in containers the user's number and the security profile.",
    ),
    "HF219": Text(
        "CUDA cannot be used",
        "No driver, no visible device, a driver that does not fit the library or torch's CUDA, a CPU build of torch, or CUDA in a forked process.",
        f"{WORDS} says so (`driver/library version mismatch`, `no NVIDIA driver`, `No CUDA GPUs are available` …).",
        "nvidia-smi on that node; after a driver's upgrade reload its modules or reboot; the torch build for that driver; --gpus all for a container; look at "
        "CUDA_VISIBLE_DEVICES; start_method 'spawn' for processes that use CUDA.",
    ),
    "HF220": Text(
        "no such GPU, or taken",
        "A rank asks for a device that is not visible, or two ranks use the same one.",
        f"{WORDS} says `invalid device ordinal`, `Duplicate GPU detected` or that devices are busy.",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else; --nproc-per-node gpu counts what is visible; "
        "nvidia-smi -q -d COMPUTE for the exclusive mode.",
    ),
    "HF221": Text(
        "a GPU kernel failed",
        "A kernel hit an assertion or touched memory that is not its own: mostly an index (label, token, position) beyond its table.",
        f"{WORDS} says `device-side assert` or `illegal memory access`. The line in the traceback may be a later one: kernels run asynchronously.",
        "Run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU, for the true line; check labels against the number of classes and tokens against the vocabulary.",
    ),
    "HF222": Text(
        "the GPU failed",
        "The hardware or its driver gave up: uncorrectable memory errors, a GPU that fell off the bus, a broken NVLink.",
        f"{WORDS} says so, or CUDA reports an unknown error.",
        "dmesg | grep -i xid and nvidia-smi -q on that node; drain it and have the GPU reset or replaced. --exclude-after 1 keeps a job away from a host that was blamed.",
    ),
    "HF223": Text(
        "native code crashed",
        "Compiled code touched memory that is not its own, met an instruction that this processor lacks, or gave itself up; or a file "
        "shrank or vanished while it was mapped (SIGBUS with room left in /dev/shm).",
        "The worker ended by SIGSEGV, SIGABRT, SIGILL, SIGFPE or their like, and its last words do not speak of peers.",
        "The Python stack of that moment is on its stderr (faulthandler): the innermost package is the suspect. Rebuild it for this torch and processor, "
        "or leave it out; MALLOC_CHECK_=3 and gdb for your own.",
    ),
    "HF224": Text(
        "the process group could not be set up",
        "In init_process_group ranks did not find each other: MASTER_ADDR is a name or address that others cannot reach, a firewall stands between, "
        "gloo or NCCL took the wrong interface, or a rank never came that far.",
        "A time-out or connection error of the store or of the first connections, with init_process_group or torch's rendezvous in the traceback.",
        "Leave MASTER_ADDR and MASTER_PORT as holdfast sets them; --local-addr names the address that others reach; open all TCP ports between "
        "the nodes; GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME. `holdfast doctor` names the pair that fails.",
    ),
    "HF225": Text(
        "ranks called different collectives",
        "One rank is in another collective than the others, or in the same with another size. Without the check they would hang or exchange nonsense.",
        f"{WORDS} compares collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL, gloo's own check of sizes), or the watchdogs' collectives differ between ranks.",
        "Every rank has to make the same calls in the same order: no collective below `if rank == 0:`, drop_last=True or padded batches, the same number of steps on all ranks.",
    ),
    "HF226": Text(
        "parameters without gradient (DDP)",
        "DistributedDataParallel waits for a gradient of every parameter; in this step some took no part in the loss.",
        f"{WORDS} is DDP's: `Expected to have finished reduction in the prior iteration`.",
        "find_unused_parameters=True (it costs a little), or let every parameter take part, e.g. add 0 * output.sum(); "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters.",
    ),
    "HF227": Text(
        "models differ between ranks",
        "The ranks built models with other layers or shapes, so that gradients cannot be exchanged.",
        f"{WORDS} is DDP's or FSDP's check of parameters across ranks.",
        "The same arguments everywhere: vocabulary, number of classes and layers must not come from a rank's own part of the data.",
    ),
    "HF228": Text(
        "values that are not finite",
        "Loss, gradients or weights became NaN or infinite and something checks for it.",
        f"{WORDS} speaks of NaN, Inf or of values that are not finite.",
        "torch.autograd.set_detect_anomaly(True) names the operation; clip gradients, lower the rate, bf16 for fp16, a GradScaler with accumulation only at the "
        "real step; with accumulation divide each loss by the number of micro-batches (holdfast.train.accumulate does).",
    ),
    "HF229": Text(
        "a rank had finished while others still needed it",
        "One rank ended with exit code 0 and the rest waited for it in a collective: uneven numbers of batches, or an early return on some ranks.",
        "All failures are complaints about peers, and some ranks had ended with 0 before: the first of these is named, with its step and its last line.",
        "The same number of steps on every rank: drop_last=True, holdfast.train.DataLoader, or DDP's join(); a barrier before the end.",
    ),
    "HF230": Text(
        "too many open files",
        "The limit of open descriptors is used up: data loaders take several for each batch under way.",
        f"{WORDS} says EMFILE, or `received 0 items of ancdata`. The limit of that worker's node is added.",
        "ulimit -n 65536 before the start (LimitNOFILE= in a unit, --ulimit nofile= in docker), or "
        "torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    "HF231": Text(
        "no further thread or process",
        "A limit of processes and threads is reached: of the user (ulimit -u) or of the cgroup (pids.max).",
        f"{WORDS} says `can't start new thread` or EAGAIN. Limit and use on that node are added.",
        "OMP_NUM_THREADS and num_workers smaller, or the limit higher (docker --pids-limit, the pod's podPidsLimit, ulimit -u).",
    ),
    "HF232": Text(
        "the script does not accept its arguments",
        "An option is missing, misspelt or malformed: the script itself says so, not holdfast.",
        "Its usage on stderr (argparse, click, absl, hydra), mostly with exit code 2.",
        "Everything after the script's name belongs to the script; holdfast's own options stand before it. `holdfast run --plan …` shows how the line is understood.",
    ),
    "HF233": Text(
        "the script and --local-rank",
        "Scripts of torch.distributed.launch's time take their local rank as an argument, newer ones from LOCAL_RANK.",
        "Its argument parser asks for --local-rank, or does not know it.",
        "`holdfast launch` gives the argument, `holdfast run` does not; or int(os.environ['LOCAL_RANK']) in the script.",
    ),
    "HF234": Text(
        "a deadlock after a save",
        "One rank saves alone and is in a collective that the others do not take part in (state_dict of FSDP, a barrier), or the others ran ahead and waited too long for it.",
        "A time-out of a collective, and in the traceback or on stderr of that rank a save, or the warning of holdfast.train's guard about it.",
        "Call state_dict and save on every rank where they use collectives and write on rank 0 only; a barrier for all after it; "
        "or holdfast.train.Snapshots, which needs neither.",
    ),
    "HF235": Text(
        "ended from outside",
        "SIGTERM, SIGINT, SIGHUP or the like was sent to the worker itself, or a time limit ran out.",
        "waitpid's status, KeyboardInterrupt, or the scheduler's words on stderr. holdfast had not sent it.",
        "Send the signal to `holdfast run`, which stops all workers in order and lets them save; for time limits --preempt-signal.",
    ),
    "HF236": Text(
        "ranks are out of step",
        "A value that should be the same on all ranks is not: loss, seed, epoch, step. Each rank then trains, stops or saves by itself.",
        f"{WORDS} says that ranks differ.",
        "all_reduce a value before anything is decided by it; sampler.set_epoch(epoch); the same seed where it matters. holdfast.train's guards warn early.",
    ),
    "HF237": Text(
        "a checkpoint cannot be loaded",
        "The file is torn, is no checkpoint, or belongs to another model or optimizer.",
        f"{WORDS} comes from loading: missing keys, size mismatch, a broken zip or pickle, a damaged snapshot.",
        "Fall back to an older one; let only one rank write a file, and write to a temporary name first. `holdfast snaps verify` checks holdfast's own, and "
        "holdfast.train.Snapshots uses none that is not whole.",
    ),
    "HF238": Text(
        "a service outside the job could not be reached, or refused",
        "A download, a tracker or a database did not answer: DNS, proxy, certificate, rate limit. Or it wants to know who asks: a token, a login.",
        f"{WORDS} comes from an HTTP or database client and not from what ranks talk through.",
        "Let one rank per node download before the others start, or download beforehand (HF_HUB_OFFLINE=1); retry; make trackers optional "
        "(WANDB_MODE=offline). Tokens (HF_TOKEN, WANDB_API_KEY) have to be set on every node.",
    ),
    "HF239": Text(
        "memory was refused",
        "The machine's memory, or a limit on addresses, does not allow the allocation; nothing was killed.",
        f"{WORDS} is MemoryError, std::bad_alloc, ENOMEM or torch's CPU allocator's. What memory was left is added.",
        "The size in the message is often a mistake in a shape; else smaller batches, fewer loader workers, memory-mapped data.",
    ),
    "HF240": Text(
        "a rank hangs",
        "No rank makes steps any more, and the others wait in a collective for ranks that are somewhere else.",
        "Stacks of all ranks, taken three times: the others wait in communication at one place, the odd ones stand elsewhere and do not move.",
        "The place that is named is where to look: a loop, a lock, a slow file system, input(). Stacks of all threads are kept in the run folder; "
        "`holdfast stacks` takes new ones.",
    ),
    "HF241": Text(
        "communication is stuck",
        "All ranks wait in communication and nothing moves: packets are lost between nodes, a GPU or network card is stuck, or a rank left the group and "
        "nobody noticed.",
        "Stacks of all ranks, taken three times, show them in collectives; nobody can be named by them.",
        "`holdfast doctor` on the same nodes tests every pair; NCCL_DEBUG=INFO; dmesg for network and Xid errors.",
    ),
    "HF242": Text(
        "a rank is stopped",
        "A worker's process was stopped by a signal (SIGSTOP, SIGTSTP, a debugger) and all others wait for it.",
        "The kernel shows its state as T.",
        "kill -CONT PID on its node, or end the debugger that holds it.",
    ),
    "HF243": Text(
        "a rank waits for its data",
        "One rank's data loader delivers nothing and the others wait for that rank: a loader worker died, is stopped, or waits for a file system.",
        "Its stack waits in the DataLoader; what the loader's processes do is added.",
        "num_workers=0 or timeout= in DataLoader show the error; look at the mount that the data is on (state D in ps), and at memory.",
    ),
    "HF244": Text(
        "ranks wait in different collectives",
        "All ranks wait for the others, but not in the same place: some called another collective than the rest, and both sides wait for ever.",
        "Stacks of all ranks, taken three times, show them in communication at different places of the script; the fewest are named.",
        "Every rank has to make the same calls in the same order: look for a branch around a collective (`if rank == 0:`, an early `continue`), and at "
        "batches that only some ranks get. TORCH_DISTRIBUTED_DEBUG=DETAIL raises at the first difference.",
    ),
    "HF245": Text(
        "the process group does not come to stand",
        "Ranks wait in init_process_group for others that do not come: a rank is still at something else, an address cannot be reached, or a "
        "firewall stands between the nodes.",
        "How far each rank is on its way to the group, their stacks, and whether each node reaches the store's address just now.",
        "Where a connection is named that fails: open it, or name another address (--local-addr, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); "
        "`holdfast doctor` tests every pair. Where ranks are named: look at what they do before init_process_group.",
    ),
    "HF246": Text(
        "nothing moves, and nobody waits for another rank",
        "All ranks stand still by themselves: in a thread that does not end, in a function that runs at exit (atexit), in a lock, in input().",
        "Stacks of all ranks, taken several times, show none of them in communication, and none of them moves.",
        "The place that is named is where to look. Threads that are not daemons keep a program from ending: join them, or threading.Thread(daemon=True); "
        "a function of atexit must not wait for other ranks.",
    ),
    "HF250": Text(
        "a rank is slow",
        "One rank's own part of a step, before anybody waits for anybody, is much longer than its peers', and all are as slow as it is.",
        "The time from the end of a step to the beginning of backward, per rank, over many steps.",
        "Its data (larger samples, a slow disk), its GPU (nvidia-smi -q -d PERFORMANCE: heat, power), other processes on its cores (--numa-binding).",
    ),
    "HF251": Text(
        "a node is slow",
        "All ranks of one node are slower than those of the others.",
        "As for HF250, and it holds for most ranks of the node.",
        "That machine: other jobs, processor frequency, its storage or network path. `holdfast doctor` compares nodes.",
    ),
    "HF306": Text(
        "a node was lost",
        "The agent of a node went away without a word: killed, its machine rebooted or hung, or the network between was cut.",
        "Its connection to the coordinator closed, or it was silent for longer than the lease; no worker had failed for a reason of its own before.",
        "That machine's own logs: journalctl, dmesg, the scheduler's. The job goes on without it where --nnodes allows.",
    ),
    "HF307": Text(
        "nodes differ",
        "Nodes of one job have different versions of Python, holdfast, torch, CUDA or NCCL, or different scripts.",
        "Each agent tells its versions and a hash of the script when it joins; the coordinator compares them with those of the first node. "
        "It is a warning: the job goes on.",
        "The same environment and script everywhere: a shared folder, one container image, or rsync before the start.",
    ),
}

ADVICE = {
    "HF209": "the place that is named is where to look: a branch that only some ranks take, or work that is longer than the group's time-out",
    "HF225": "every rank has to make the same calls in the same order; TORCH_DISTRIBUTED_DEBUG=DETAIL names both sides",
    "HF229": "the same number of steps on every rank: drop_last=True, holdfast.train.DataLoader or DDP's join(); a barrier before the end",
    "HF240": "look at the place that is named; all stacks are in the run folder",
    "HF241": "`holdfast doctor` tests every pair of nodes; all stacks are in the run folder",
    "HF242": "kill -CONT that process, or end the debugger that holds it",
    "HF243": "DataLoader(num_workers=0) shows the error in place; look at memory and at the data's mount",
    "HF244": "every rank has to make the same calls in the same order; all stacks are in the run folder",
    "HF245": "open the connection that fails, or see what the missing ranks do before init_process_group",
    "HF246": "look at the place that is named: a thread that does not end, a function at exit, a lock; all stacks are in the run folder",
    "HF306": "see that machine's own logs: it was killed, rebooted or cut off from the network",
}
"""For verdicts that are made of more than one failure: one line for the last screen."""
