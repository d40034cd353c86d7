"""Rules for what torch and the libraries below it say: GPUs, ranks that do not agree, the process group, waits for peers.

Pure data. The order of these groups among all others is in rules.py.
"""

from __future__ import annotations

from holdfast.insight.causes.blame import types_of
from holdfast.insight.causes.rule import COMPLAINT, TIMED_OUT, Rule

GPU = (
    Rule(
        "HF207",
        "ran out of GPU memory: {said}",
        "smaller micro-batch with more accumulation, activation checkpointing or FSDP; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "against fragmentation; nvidia-smi shows whether others are on that GPU",
        says=r"(?:CUDA|HIP|XPU|NPU|MPS)\b.{0,40}out of memory|CUDA_ERROR_OUT_OF_MEMORY|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
        r"|Cuda failure .{0,10}'?out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED: Out of memory|out of (?:GPU|device|HBM) memory",
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
        "asked for NCCL without a GPU or with a torch that has none: {said}",
        "on the CPU init_process_group('gloo'), or without a backend, which takes what fits; else a torch built for CUDA "
        "(python -c 'import torch; print(torch.version.cuda)') and a GPU that nvidia-smi shows",
        says=r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs|not compiled with NCCL",
        per_node=True,
    ),
    Rule(
        "HF219",
        "cannot use CUDA here: {said}",
        "nvidia-smi and python -m torch.utils.collect_env on that node: driver, visible devices and torch's CUDA build must fit; reload the "
        "driver or reboot after an upgrade; --gpus all for a container",
        says=r"driver/library version mismatch|driver version is insufficient|no NVIDIA driver|No (?:CUDA|HIP|XPU) GPUs are available|nvmlInit"
        r"|no CUDA-capable device|not compiled with CUDA|driver initialization failed|driver on your system is too old"
        r"|no kernel image is available|CUDA_ERROR_(?:NO_DEVICE|NOT_INITIALIZED|SYSTEM_\w+|COMPAT\w+)|only supported with GPUs"
        r"|forward compatibility was attempted|system not yet initialized|libcuda\.so|CUDA (?:is )?(?:not |un)available"
        r"|has no attribute '_cuda|CUDA unknown error|nvidia-smi.{0,30}(?:has failed|not found)|torch\.cuda\.is_available\(\) is False"
        r"|CUDA error: (?:initialization error|system)|\bNVML\w*Error|NVML Shared Library",
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
        r"(?:differ|diverge|disagree|not (?:equal|identical|the same)|desync|mismatch).{0,80}\b(?:ranks?|process(?:es)?|replicas?|workers?|nodes?)\b"
        r"|(?:ranks?|processes|replicas|workers) .{0,60}(?:disagree|diverge|desync|not in sync|different (?:loss|step|epoch|seed))",
    ),
    Rule(
        "HF228",
        "met values that are not finite: {said}",
        "torch.autograd.detect_anomaly() finds the operation; lower rate, gradient clipping, bf16 for fp16; with accumulation divide each loss "
        "by the number of micro-batches",
        says=r"returned nan values|\b(?:nan|inf)s?\b[`'\"]?.{0,40}(?:loss|grad|norm|detected|found|encountered|values?|weights?|at step|in (?:the )?)"
        r"|(?:loss|grad\w*|norm|outputs?|logits?|tensor|weights?|activations?|values?)\b.{0,60}\b(?:nan|inf|infinite|infinity)s?\b"
        r"|non[- ]?finite|(?:loss|grad\w*|norm)\b.{0,40}\bnot a number|not finite|float (?:nan|infinity)|isfinite|isnan|loss scale already at minimum|minimum loss scale|contains either",
        types=types_of("FloatingPointError"),
    ),
)

GROUP_ADVICE = (
    "every node must reach MASTER_ADDR:MASTER_PORT: name resolution, firewall, the right interface (--local-addr); or a rank "
    "that came late or not at all; `holdfast doctor` tests every pair"
)
TRANSPORT_ADVICE = "NCCL_DEBUG=INFO shows the failing call; NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME) must name the interface that the nodes share"

PEERS = (
    Rule(
        "HF224",
        "could not set up its process group: {said}",
        GROUP_ADVICE,
        says=r"clients joined|connectFullMesh|ncclUniqueId|env:// rendezvous|Timed out .{0,60}waiting for clients"
        r"|timed out initializing process group|IPv[46] network addresses of|keys: /?default_pg/0/",
        facts=("interfaces",),
    ),
    Rule(
        "HF224",
        "could not set up its process group: {said}",
        GROUP_ADVICE,
        says=r"timed? ?-?out|timeout|connect|refused|closed|reset|resol|address|Name or service|hasn't joined",
        frames=r"/distributed/rendezvous\.py| in (?:init_process_group|_new_process_group_helper|_store_based_barrier)$",
        only=COMPLAINT,
        facts=("interfaces",),
    ),
    Rule(
        "HF208",
        "has a network or system error under its collectives: {said}",
        TRANSPORT_ADVICE,
        says=r"ncclSystemError|ncclInternalError|NCCL.{0,200}(?:internal|system) error|ifa != nullptr|ncclInvalidUsage"
        r"|NET/(?:IB|Socket|OFI).{0,80}(?:fail|error|WARN)|NCCL.{0,120}invalid usage|no socket interface found"
        r"|Unable to find (?:address for|interface)",
        facts=("interfaces",),
    ),
    Rule(
        "HF208",
        "has a network or system error under its collectives: {said}",
        TRANSPORT_ADVICE,
        says=r"unhandled system error|Unable to resolve hostname|\bibv_\w+|No route to host|Network is unreachable"
        r"|neither AF_INET|Connect to \S+ failed",
        peers=True,
        facts=("interfaces",),
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
        peers=True,
    ),
    Rule(
        "HF209",
        "waited in vain for its peers in a collective: {said}",
        "some rank did not come: its stack and step are in `holdfast stacks` and `holdfast status`; look for a branch that only some ranks take, "
        "or work longer than the time-out",
        says=r"timed? ?-?out|timeout|watchdog caught|failed to pass|heartbeat|deadline exceeded",
        only=TIMED_OUT,
        peers=True,
    ),
    Rule(
        "HF210",
        "lost its connection to a peer, and no other rank said why: {said}",
        "see the other ranks' logs and their machines' (dmesg, the scheduler's log); then the network between the nodes",
        says=r"closed|reset|refused|abort|broken|peer|remote|recv|send|end ?of ?file|connect|EOF",
        types=types_of("ConnectionResetError BrokenPipeError ConnectionRefusedError ConnectionAbortedError EOFError"),
        only=COMPLAINT,
        peers=True,
    ),
)
