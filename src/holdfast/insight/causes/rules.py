"""The table of causes: by which words or which end each is recognised, and what the last screen says of it.

Pure data. Order matters: the first rule that fits decides, so narrow ones stand before wide ones. Rules are written
against what libraries keep saying over their versions, not against whole messages. What each code means at length is
in texts.py, under the same code.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from holdfast.insight.causes.blame import Blame, types_of

TIMED_OUT = frozenset({Blame.WAITED, Blame.WAITED_LATE, Blame.LOOSE})
COMPLAINT = TIMED_OUT | {Blame.CUT, Blame.STOPPED}
ANY: frozenset[Blame] = frozenset(Blame)


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    line: str
    """What the verdict says, after `rank 3 on b`. {said}: first line of its words; named groups of `says`."""
    advice: str
    says: str = ""
    """Searched in its words, any case; in its stderr where it has none."""
    stderr: str = ""
    """Searched in its stderr, whatever it says itself."""
    types: frozenset[str] = frozenset()
    """Or: its exception is one of these."""
    ends: frozenset[int] = frozenset()
    """Or: it ended so."""
    only: frozenset[Blame] = ANY
    frames: str = ""
    """Has to be found too among the files of its traceback's last frames; `says` or `types` alone do not fit then."""
    facts: tuple[str, ...] = ()
    """What its agent may have found out that belongs into the advice."""
    per_node: bool = False
    """It depends on the machine: worth saying which nodes reported it and which did not."""


def _ends(*signals: signal.Signals) -> frozenset[int]:
    """By this signal, also where a shell between us passes it on as 128+N."""
    return frozenset(-signum for signum in signals) | frozenset(128 + signum for signum in signals)


GPU = (
    Rule(
        "HF207",
        "ran out of GPU memory: {said}",
        "smaller micro-batch with more accumulation, activation checkpointing or FSDP; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "against fragmentation; nvidia-smi shows whether others are on that GPU",
        says=r"(?:CUDA|HIP|XPU|NPU|MPS)\b.{0,40}out of memory|CUDA_ERROR_OUT_OF_MEMORY|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
        r"|Cuda failure .{0,10}'?out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED|out of (?:GPU|device|HBM) memory",
        types=types_of("OutOfMemoryError"),
    ),
    Rule(
        "HF221",
        "failed in a GPU kernel: {said}",
        "run again with CUDA_LAUNCH_BLOCKING=1 for the true line; most often a label or token index out of range",
        says=r"device-side assert(?!ion)|CUDA_ERROR_ASSERT|illegal memory access|misaligned address|CUDA_ERROR_ILLEGAL_ADDRESS"
        r"|unspecified launch failure|an illegal instruction was encountered|CUDA error: invalid (?:configuration|argument)"
        r"|indexing\.cu|\.cu:\d+.{0,200}Assertion",
    ),
    Rule(
        "HF222",
        "lost its GPU: {said}",
        "dmesg on that node (NVRM: Xid) and nvidia-smi -q say more; drain the node and have the GPU reset or replaced",
        says=r"uncorrectable|\bECC\b|\bXid\b|fallen off the bus|GPU is lost|hardware stack error|CUDA error: unknown error"
        r"|CUDA_ERROR_UNKNOWN|\bnvlink\b.{0,40}(?:error|fail)|device (?:is )?unavailable|row.?remap|CUDA error: the launch timed out"
        r"|Unable to determine the device handle|(?:contained|uncontained) error",
        per_node=True,
    ),
    Rule(
        "HF220",
        "asked for a GPU that is not there or is taken: {said}",
        "one process per GPU: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and --nproc-per-node no larger than what "
        "CUDA_VISIBLE_DEVICES leaves",
        says=r"invalid device ordinal|CUDA_ERROR_INVALID_DEVICE|Duplicate GPU detected|devices? .{0,30}(?:are|is) busy or unavailable"
        r"|device index .{0,40}(?:out of range|must be|invalid)|on CUDA device \d+ but|device >= 0 && device < num_gpus|Invalid device id"
        r"|(?:using|mapped to|share) the same (?:GPU|CUDA device)",
        per_node=True,
    ),
    Rule(
        "HF219",
        "cannot use CUDA in a forked process",
        "DataLoader(multiprocessing_context='spawn'), or no CUDA call before the fork",
        says=r"re-?initialize CUDA in forked",
    ),
    Rule(
        "HF219",
        "cannot use CUDA here: {said}",
        "nvidia-smi and python -m torch.utils.collect_env on that node: driver, visible devices and torch's CUDA build must fit; reload the "
        "driver or reboot after an upgrade; --gpus all for a container",
        says=r"driver/library version mismatch|driver version is insufficient|no NVIDIA driver|No (?:CUDA|HIP|XPU) GPUs are available|nvmlInit"
        r"|no CUDA-capable device|not compiled with (?:CUDA|NCCL)|driver initialization failed|driver on your system is too old"
        r"|no kernel image is available|CUDA_ERROR_(?:NO_DEVICE|NOT_INITIALIZED|SYSTEM_\w+|COMPAT\w+)|only supported with GPUs"
        r"|forward compatibility was attempted|system not yet initialized|libcuda\.so|CUDA (?:is )?(?:not|un)available"
        r"|doesn't have NCCL built in|has no attribute '_cuda|CUDA unknown error|nvidia-smi.{0,30}(?:has failed|not found)|torch\.cuda\.is_available\(\) is False"
        r"|CUDA error: (?:initialization error|system)",
        per_node=True,
    ),
    Rule(
        "HF221",
        "failed on its GPU: {said}",
        "run again with CUDA_LAUNCH_BLOCKING=1 for the true line; the same on one node only means its GPU or driver: dmesg, nvidia-smi -q",
        says=r"\b(?:CUDA|HIP|cuDNN|cuBLAS|Triton) error|CU(?:BLAS|DNN|SOLVER|FFT|SPARSE)_STATUS_|AcceleratorError",
        types=types_of("AcceleratorError"),
    ),
)

AGREEMENT = (
    Rule(
        "HF225",
        "found that ranks called different collectives, or with other sizes: {said}",
        "every rank has to make the same calls in the same order: look for `if rank == 0:` around a collective, or batches of different size; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names both sides",
        says=r"mismatch(?:ed)? (?:between|in|of|across) .{0,20}(?:collective|tensor shape|sizes? .{0,20}rank)|CollectiveFingerPrint"
        r"|op\.preamble\.length|different (?:collectives?|number of elements) .{0,40}rank|collectives? .{0,30}mismatch|ncclInvalidUsage.{0,200}mismatch"
        r"|message (?:was )?truncated|(?:desync|Collective) .{0,40}(?:detected|report)",
    ),
    Rule(
        "HF226",
        "did not use all parameters in the loss",
        "DistributedDataParallel(find_unused_parameters=True), or let every parameter take part; TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
        says=r"finished reduction in the prior iteration|not used in producing (?:the )?loss|mark a variable ready only once"
        r"|marked (?:as )?ready twice",
    ),
    Rule(
        "HF227",
        "has another model than its peers: {said}",
        "build the model from the same arguments on every rank: no layer, vocabulary or class count may depend on the rank or on its data",
        says=r"expects same model|appears not to match (?:sizes|strides)|inconsistent \d+ params|inconsistent (?:number of )?param"
        r"|(?:param\w*|model|state_dict|weight)s? .{0,80}(?:differ|mismatch|not the same|inconsistent|not identical).{0,60}(?:across|between|among|on|from)"
        r" .{0,20}(?:rank|process|worker)",
    ),
    Rule(
        "HF236",
        "found the ranks out of step: {said}",
        "the same seed, epoch and number of batches on every rank; all-reduce a value before it decides anything; "
        "holdfast.train's guards warn where the loss differs",
        says=r"\bout[ -]of[ -](?:sync|step)|(?:loss|seed|rng|random state|epoch|step|iteration|gradient|metric|learning rate)s?\b.{0,60}"
        r"(?:differ|diverge|disagree|not (?:equal|identical|the same)|desync|mismatch).{0,80}(?:rank|process|replica|worker|node)"
        r"|(?:ranks?|processes|replicas|workers) .{0,60}(?:disagree|diverge|desync|not in sync|different (?:loss|step|epoch|seed))",
    ),
    Rule(
        "HF228",
        "met values that are not finite: {said}",
        "torch.autograd.detect_anomaly() finds the operation; lower rate, gradient clipping, bf16 for fp16; with accumulation divide each loss "
        "by the number of micro-batches",
        says=r"returned nan values|\b(?:nan|inf)s?\b[`'\"]?.{0,40}(?:loss|grad|norm|detected|found|encountered|values?|weights?|at step|in (?:the )?)"
        r"|(?:loss|grad\w*|norm|outputs?|logits?|tensor|weights?|activations?|values?)\b.{0,60}\b(?:nan|inf|infinite|infinity)s?\b"
        r"|non-?finite|not finite|float (?:nan|infinity)|isfinite|isnan|loss scale already at minimum|minimum loss scale|contains either",
        types=types_of("FloatingPointError"),
    ),
)

LIMITS = (
    Rule(
        "HF230",
        "ran out of file descriptors",
        "ulimit -n 65536 before the start, or torch.multiprocessing.set_sharing_strategy('file_system')",
        says=r"Too many open files|received 0 items of ancdata|\bE[MN]FILE\b|Errno 2[34]\]",
        facts=("nofile",),
    ),
    Rule(
        "HF216",
        "ran out of shared memory (/dev/shm)",
        "df -h /dev/shm; docker run --shm-size=16g (or --ipc=host), in Kubernetes an emptyDir with medium: Memory; fewer loader workers",
        says=r"unable to (?:open|write to|allocate|mmap|resize|create).{0,30}shared memory|insufficient shared memory|out of shared memory"
        r"|No space left on device.{0,20}'?/(?:torch|psm|pymp|dev/shm|sem)|/dev/shm.{0,200}No space|shared memory segment|shm_open"
        r"|/(?:torch|psm|pymp|sem)[_-][^\n]{0,40}No space|mmap .{0,60}</torch_|killed by signal: Bus error|received signal 7\b|Unexpected bus error",
        facts=("shm",),
        per_node=True,
    ),
    Rule(
        "HF216",
        "was ended by {signal}",
        "df -h /dev/shm; docker run --shm-size=16g (or --ipc=host), in Kubernetes an emptyDir with medium: Memory; else a file that shrank while it was mapped",
        ends=_ends(signal.SIGBUS),
        facts=("shm",),
        per_node=True,
    ),
    Rule(
        "HF216",
        "lost a data-loader worker to a full /dev/shm",
        "docker run --shm-size=16g (or --ipc=host), in Kubernetes an emptyDir with medium: Memory; fewer loader workers",
        says=r"DataLoader worker",
        stderr=r"Unexpected bus error|insufficient shared memory",
        facts=("shm",),
        per_node=True,
    ),
    Rule(
        "HF214",
        "could not write: {said}",
        "make room (df -h, df -i, quota), or write checkpoints elsewhere; older snapshots go with `holdfast snaps prune`",
        says=r"No space left on device|\bENOSPC\b|Errno (?:28|122|27)\]|quota exceeded|\bEDQUOT\b|File too large|\bEFBIG\b|File size limit exceeded"
        r"|PytorchStreamWriter failed|disk (?:is )?full|not enough (?:free )?disk space|file write failed|unexpected pos \d+ vs",
        ends=_ends(signal.SIGXFSZ),
        facts=("disks",),
        per_node=True,
    ),
    Rule(
        "HF215",
        "lost a data-loader worker: {said}",
        "`Killed` is memory (fewer workers, smaller prefetch_factor, more RAM); else its own words are on stderr above: num_workers=0 shows "
        "the error in place",
        says=r"DataLoader worker .{0,80}(?:killed|exited|received signal|died)|DataLoader timed out|Pin memory thread exited|(?:data )?loader.{0,20} worker.{0,40}(?:died|exited|killed)"
        r"|worker process.{0,40}(?:terminated abruptly|died unexpectedly)",
        types=types_of("BrokenProcessPool"),
        facts=("memory", "shm"),
    ),
    Rule(
        "HF215",
        "lost a data-loader worker: {said}",
        "fewer loader workers or more memory if they were killed; num_workers=0 shows an error of theirs in place",
        types=types_of("ConnectionResetError EOFError BrokenPipeError ConnectionRefusedError"),
        frames=r"/torch/utils/data/|/torch/multiprocessing/|/multiprocessing/resource_sharer",
        facts=("memory", "shm"),
    ),
    Rule(
        "HF231",
        "could not start a thread or process: {said}",
        "ulimit -u, and the cgroup's pids.max (docker --pids-limit): fewer loader workers or threads (OMP_NUM_THREADS), or a higher limit",
        says=r"can't start new thread|Resource temporarily unavailable|pthread_create.{0,20}failed|cannot fork|fork: retry"
        r"|thread creation failed|Errno 11\].{0,60}(?:fork|process)|thread.{0,20}could not be (?:started|created)|unable to create (?:new )?(?:native )?thread",
        facts=("pids",),
        per_node=True,
    ),
    Rule(
        "HF239",
        "was refused memory by its machine: {said}",
        "the request is too large for this machine or its limit (ulimit -v, cgroup): smaller batches, fewer loader workers, memory-mapped data",
        says=r"can't allocate memory|Cannot allocate memory|\bENOMEM\b|Errno 12\]|bad_alloc|Unable to allocate .{0,40} (?:for an array|bytes)"
        r"|not enough memory|DefaultCPUAllocator",
        types=types_of("MemoryError _ArrayMemoryError ArrayMemoryError bad_alloc"),
        facts=("memory",),
        per_node=True,
    ),
    Rule(
        "HF213",
        "found its port taken: {said}",
        "let the launcher choose (no fixed MASTER_PORT in the script), or end the process that holds it: ss -ltnp",
        says=r"address already in use|\bEADDRINUSE\b|Errno 98\]|port .{0,30}(?:already in use|is in use|is taken|is occupied)",
        facts=("port",),
        per_node=True,
    ),
)

PEERS = (
    Rule(
        "HF224",
        "could not set up its process group: {said}",
        "every node must reach MASTER_ADDR:MASTER_PORT: name resolution, firewall, the right interface (--local-addr); or a rank that came late "
        "or not at all; `holdfast doctor` tests every pair",
        says=r"clients joined|(?:client|server) socket .{0,60}(?:timed out|failed)|connectFullMesh|ncclUniqueId|env:// rendezvous"
        r"|wait timeout after|Timed out .{0,60}waiting for clients|timed out initializing process group|hasn't joined"
        r"|failed to connect to .{0,60}(?:store|server|MASTER|master)|Timeout waiting for key|Socket Timeout|IPv[46] network addresses of",
        facts=("interfaces",),
    ),
    Rule(
        "HF224",
        "could not set up its process group: {said}",
        "every node must reach MASTER_ADDR:MASTER_PORT: name resolution, firewall, the right interface (--local-addr); or a rank that came late "
        "or not at all; `holdfast doctor` tests every pair",
        says=r"timed? ?-?out|timeout|connect|refused|closed|reset|resol|address|Name or service",
        frames=r"/distributed/rendezvous\.py| in (?:init_process_group|_new_process_group_helper|_store_based_barrier)$",
        only=COMPLAINT,
        facts=("interfaces",),
    ),
    Rule(
        "HF208",
        "has a network or system error under its collectives: {said}",
        "NCCL_DEBUG=INFO shows the failing call; NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME) must name the interface that the nodes share",
        says=r"ncclSystemError|unhandled system error|no socket interface found|ncclInternalError|NCCL.{0,200}internal error|ifa != nullptr"
        r"|Unable to find (?:address|interface)|Unable to resolve hostname|ibv_\w+|NET/(?:IB|Socket|OFI).{0,80}(?:fail|error|WARN)|No route to host"
        r"|Network is unreachable|neither AF_INET|ncclInvalidUsage|NCCL.{0,120}invalid usage|Connect to \S+ failed|libnccl",
        facts=("interfaces",),
    ),
)

FILES = (
    Rule(
        "HF212",
        "cannot compile here: {said}",
        "torch.compile and extensions need a C++ compiler, Python's headers (python3-dev), ninja, and the triton that belongs to this torch; "
        "TORCH_COMPILE_DISABLE=1 runs without",
        says=r"CppCompileError|C\+\+ compile error|working triton installation|InvalidCxxCompiler|No working C\+\+ compiler|find C compiler|Python\.h:"
        r"|Ninja is required|Error (?:building|compiling) (?:extension|objects)",
        per_node=True,
    ),
    Rule(
        "HF212",
        "does not find a library: {said}",
        "it is not on this machine, or LD_LIBRARY_PATH does not lead to it: install the package that has it, or anew the one that wants it; ldd "
        "shows what is missing",
        says=r"cannot open shared object file",
        per_node=True,
    ),
    Rule(
        "HF212",
        "cannot load a library: {said}",
        "what was compiled for another CUDA, torch, numpy or glibc has to be installed anew in this environment; pip check, ldd",
        says=r"undefined symbol|GLIBC(?:XX)?_[\d.]+. not found|not found \(required by|compiled (?:with|using|against|for)"
        r" .{0,60}(?:numpy|torch|CUDA|version|module)|size changed, may indicate binary|invalid ELF|wrong ELF|symbol lookup error"
        r"|_ARRAY_API not found|binary incompatib|mismatches the version|operator \S+ does not exist|ABI version|numpy\.core\.multiarray failed|compiled with different versions",
        per_node=True,
    ),
    Rule(
        "HF211",
        "has no torch: {said}",
        "install torch into the Python that runs the script: python -m pip install torch",
        says=r"No module named '?torch'?(?:\s|$)",
        per_node=True,
    ),
    Rule(
        "HF211",
        "cannot import what the script needs: {said}",
        "the same environment on every node: pip install it there, or mount one environment everywhere; a partially initialized module is the "
        "script's own file with a library's name",
        says=r"No module named|cannot import name|seems to be not installed|is not installed|package .{0,40}(?:not found|is required)",
        types=types_of("ModuleNotFoundError ImportError PackageNotFoundError"),
        only=frozenset({Blame.OWN, Blame.OWN_LATE}),
        per_node=True,
    ),
    Rule(
        "HF237",
        "cannot load its checkpoint: {said}",
        "a file cut short by a full disk or a killed save, or one of another model: compare sizes and keys; holdfast.train.Snapshots commits "
        "or leaves nothing",
        says=r"in loading state_dict|size mismatch for|Missing key\(s\)|Unexpected key\(s\)|PytorchStreamReader failed|central directory|invalid load key"
        r"|pickle data was truncated|Weights only load failed|HeaderTooLarge|HeaderTooSmall|InvalidHeader|IncompleteBuffer|Ran out of input"
        r"|(?:different number of parameter groups|doesn't match the size of optimizer)|(?:corrupt\w*|damaged|truncated) (?:checkpoint|snapshot|file|zip|archive)"
        r"|not a (?:zip|checkpoint) file|checkpoint.{0,60}(?:corrupt|damaged|incompatible|does not match)",
        types=types_of(
            "UnpicklingError SafetensorError BadZipFile CheckpointException SnapshotDamagedError NoValidSnapshotError"
        ),
    ),
    Rule(
        "HF218",
        "may not do what it tried: {said}",
        "owner and mode of that path for the user who runs the job, read-only mounts, the container's security profile",
        says=r"Permission denied|Operation not permitted|Read-only file system|Errno (?:1|13|30)\]|\bE(?:ACCES|PERM|ROFS)\b",
        types=types_of("PermissionError"),
        per_node=True,
    ),
    Rule(
        "HF217",
        "met a file system that fails: {said}",
        "dmesg and the mount on that node (NFS server, FUSE daemon); remount it",
        says=r"Stale file handle|Input/output error|Transport endpoint is not connected|Errno (?:5|107|116)\]|Remote I/O error",
        per_node=True,
    ),
    Rule(
        "HF217",
        "does not find a file: {said}",
        "every node needs the file under the same path: a shared folder, or a copy on each; a relative path counts from where the job was started",
        says=r"No such file or directory|Parent directory .{0,200} does not exist|can't open file|(?:file|path|folder|directory|dataset)\b.{0,200}"
        r"(?:does not exist|doesn't exist|not found|is missing)|Errno 2\]",
        types=types_of("FileNotFoundError NotADirectoryError"),
        per_node=True,
    ),
    Rule(
        "HF238",
        "was refused by a service outside the job: {said}",
        "the name of what it asks for, and who asks: log in or set the token (HF_TOKEN, WANDB_API_KEY, AWS keys) on every node",
        says=r"gated repo|\b40[13] (?:Client Error|Forbidden|Unauthorized)|RepositoryNotFound|is not a valid model identifier|Invalid (?:user )?token"
        r"|AccessDenied|InvalidAccessKeyId|NoCredentialsError|Unable to locate credentials|api[_ ]key not configured",
    ),
    Rule(
        "HF238",
        "could not reach a service outside the job: {said}",
        "proxy, DNS and firewall of that node; let one rank per node download before the others, or work offline (HF_HUB_OFFLINE=1)",
        says=r"https?://|\b(?:wandb|mlflow|requests|urllib3?|httpx|botocore|huggingface_hub|aiohttp)\.\w|HTTPS?Connection|urlopen error|HTTP Error|Max retries exceeded|SSLError|CERTIFICATE_VERIFY|Name or service not known|name resolution"
        r"|nodename nor servname|ReadTimeout|couldn't connect to|Couldn't reach|EndpointConnectionError|LocalEntryNotFound|status code [45]\d\d",
        types=types_of(
            "HTTPError URLError ConnectTimeout ReadTimeout SSLError gaierror EndpointConnectionError LocalEntryNotFoundError MaxRetryError"
        ),
        per_node=True,
    ),
    Rule(
        "HF238",
        "could not reach a service outside the job: {said}",
        "proxy, DNS and firewall of that node; let one rank per node download before the others, or work offline (HF_HUB_OFFLINE=1)",
        says=r"connect|timed? ?out|timeout|closed|reset|refused|aborted|broken pipe|resol|unreachable",
        frames=r"/(?:requests|urllib3|httpx|httpcore|aiohttp|botocore|huggingface_hub|wandb|mlflow|s3fs|gcsfs|grpc|redis|pymongo|psycopg2?)/"
        r"|/urllib/request\.py|/http/client\.py",
        per_node=True,
    ),
)

WAITING = (
    Rule(
        "HF234",
        "waited for its peers in vain while one of them saved alone",
        "a state_dict or save that uses collectives has to be called on every rank, and a barrier after a save by rank 0 alone; "
        "or use holdfast.train.Snapshots",
        says=r"timed? ?-?out|timeout|failed to pass",
        stderr=r"alone called torch\.save|\bsave_(?:checkpoint|pretrained|state|model)\b|torch\.save\(|\.save\(|gather_full_state|FULL_STATE_DICT",
        only=TIMED_OUT,
    ),
    Rule(
        "HF209",
        "waited in vain for its peers in a collective: {said}",
        "some rank did not come: its stack and step are in `holdfast stacks` and `holdfast status`; look for a branch that only some ranks take, "
        "or work longer than the time-out",
        says=r"timed? ?-?out|timeout|watchdog caught|failed to pass|heartbeat|deadline exceeded",
        only=TIMED_OUT,
    ),
    Rule(
        "HF210",
        "lost its connection to a peer, and no other rank said why: {said}",
        "see the other ranks' logs and their machines' (dmesg, the scheduler's log); then the network between the nodes",
        says=r"closed|reset|refused|abort|broken|peer|remote|recv|send|end ?of ?file|connect|EOF",
        types=types_of("ConnectionResetError BrokenPipeError ConnectionRefusedError ConnectionAbortedError EOFError"),
        only=COMPLAINT,
    ),
)

ENDS = (
    Rule(
        "HF233",
        "was given --local-rank, which it does not know",
        "`holdfast run` in place of `holdfast launch`: it passes the rank in LOCAL_RANK only",
        says=r"unrecognized arguments:.{0,200}--local[-_]rank|No such option.{0,20}--local[-_]rank",
        ends=frozenset(),
    ),
    Rule(
        "HF233",
        "expects --local-rank as an argument",
        "`holdfast launch` in place of `holdfast run` gives it one; or read os.environ['LOCAL_RANK'] in the script",
        says=r"arguments are required:.{0,200}local[-_]rank|Missing option.{0,20}local[-_]rank|has no attribute 'local_rank'",
    ),
    Rule(
        "HF232",
        "does not accept its arguments: {said}",
        "check what follows the script's name on the command line; options of holdfast come before it",
        says=r": error: (?:argument|the following|unrecognized|invalid|ambiguous|expected|one of|no such)|^usage: [^\n]|^Error: (?:No such option|Missing|Invalid|Got unexpected)|Flags parsing error|the following arguments are required"
        r"|unrecognized arguments|Could not override|Key '.{0,80}' is not in struct",
        types=types_of(
            "ArgumentError UsageError MissingParameter BadParameter NoSuchOption UnrecognizedFlagError ConfigCompositionException"
        ),
        only=frozenset({Blame.OWN, Blame.OWN_LATE}),
    ),
    Rule(
        "HF235",
        "was ended by a time limit",
        "ask the scheduler for more time, and let it announce the end: --preempt-signal, so that workers save and leave; they resume from there",
        says=r"DUE TO TIME LIMIT|CPU time limit exceeded|walltime|wall-?clock limit|time limit (?:exceeded|reached)|TimeLimitExceeded",
        ends=_ends(signal.SIGXCPU),
    ),
    Rule(
        "HF235",
        "was ended from outside by {signal}",
        "somebody, or a scheduler, sent it to the worker itself; send it to `holdfast run` instead, which stops all workers in order",
        says=r"^KeyboardInterrupt|CANCELLED AT",
        ends=_ends(
            signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
        ),
        types=types_of("KeyboardInterrupt"),
    ),
    Rule(
        "HF223",
        "crashed in native code by {signal}",
        "the Python stack of that moment is on its stderr; suspects are extensions compiled for another version: rebuild, or leave out one by one",
        ends=_ends(signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP),
        per_node=True,
    ),
)

RULES: tuple[Rule, ...] = (*GPU, *AGREEMENT, *LIMITS, *PEERS, *FILES, *WAITING, *ENDS)
