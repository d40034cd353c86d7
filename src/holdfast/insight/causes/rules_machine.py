"""Rules for what a machine lacks: memory, disks, limits, libraries, modules, files, rights.

Pure data. The order of these groups among all others is in rules.py.
"""

from __future__ import annotations

import signal

from holdfast.insight.causes.blame import types_of
from holdfast.insight.causes.rule import OWN, Rule, ends_by

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
        ends=ends_by(signal.SIGBUS),
        room="shm",
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
        r"|PytorchStreamWriter failed|disk (?:is )?full|not enough (?:free )?disk space|file write failed|iostream error|unexpected pos \d+ vs"
        r"|\d+ requested and \d+ written",
        ends=ends_by(signal.SIGXFSZ),
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
        says=r"can't start new thread|pthread_create.{0,20}failed|cannot fork|\bfork: |unable to fork"
        r"|thread creation failed|Errno 11\].{0,60}(?:fork|process)|thread.{0,20}could not be (?:started|created)|unable to create (?:new )?(?:native )?thread",
        facts=("pids",),
        per_node=True,
    ),
    Rule(
        "HF231",
        "could not start a thread or process: {said}",
        "ulimit -u, and the cgroup's pids.max (docker --pids-limit): fewer loader workers or threads (OMP_NUM_THREADS), or a higher limit",
        says=r"Resource temporarily unavailable",
        frames=r"/subprocess\.py|/multiprocessing/(?:popen_\w+|context|process)\.py|/threading\.py|/os\.py",
        facts=("pids",),
        per_node=True,
    ),
    Rule(
        "HF239",
        "was refused memory by its machine: {said}",
        "the request is too large for this machine or its limit (ulimit -v, cgroup): smaller batches, fewer loader workers, memory-mapped data",
        says=r"can't allocate memory|Cannot allocate memory(?! in static TLS)|\bENOMEM\b|Errno 12\]|bad_alloc|Unable to allocate .{0,40} (?:for an array|bytes)"
        r"|not enough memory|DefaultCPUAllocator|\b(?:malloc|realloc|mmap|posix_memalign)(?:\([\d ]*\)| of [^,\n]{1,30})? failed|memory allocation [^,\n]{0,30}\bfailed"
        r"|fail\w* to (?:allocate|reserve) .{0,40}(?:bytes|memory|\d ?[KMGT]i?B)\b",
        types=types_of("MemoryError _ArrayMemoryError ArrayMemoryError bad_alloc"),
        facts=("memory",),
        per_node=True,
    ),
    Rule(
        "HF213",
        "found its port taken: {said}",
        "let the launcher choose (no fixed MASTER_PORT in the script), or end the process that holds it: ss -ltnp",
        says=r"address already in use|(?:fail\w*|cannot|could not|unable) to bind\b|could not bind\b|\bEADDRINUSE\b|Errno 98\]|port .{0,30}(?:already in use|is in use|is taken|is occupied)",
        facts=("port",),
        per_node=True,
    ),
)

PATH_WITH_SLASH = r"(?:~|\.{1,2})?/[\w.~-]+[^\s'\",;]*"
PATH_WITH_ENDING = (
    r"[\w./~-]+\.(?:pth?|bin|ckpt|jsonl?|csv|tsv|txt|np[yz]|parquet|arrow|h5|hdf5|tar|zip|gz|zst|ya?ml|toml|safetensors"
    r"|jpe?g|png|wav|flac|mp[34]|pkl|model|py|sh)"
)
PATH = r"[\w./~-]+"
GONE = r"(?:does(?: not|n't) exist|(?:was |is )?not found|is missing|(?:can|could) ?not be found)"
NO_FILES = r"(?:\b(?:columns?|fields?|keys?|tables?|sections?|attributes?|options?|class)\b|://|\bon the Hub\b)"
"""Words of lines that speak of something else that is not there."""

FILES = (
    Rule(
        "HF212",
        "cannot compile here: {said}",
        "torch.compile and extensions need a C++ compiler, Python's headers (python3-dev), ninja, and the triton that belongs to this torch; "
        "TORCH_COMPILE_DISABLE=1 runs without",
        says=r"CppCompileError|C\+\+ compile error|working triton installation|InvalidCxxCompiler|No working C\+\+ compiler|find C compiler|Python\.h:"
        r"|Ninja is required|Error (?:building|compiling) (?:extension|objects)"
        r"|Command .{0,3}['\"](?:\S*/)?(?:ninja|nvcc|gcc|g\+\+|c\+\+|cc|clang\+*|cmake|ptxas)['\"].{0,2000}returned non-zero",
        per_node=True,
    ),
    Rule(
        "HF212",
        "does not find a library: {said}",
        "it is not on this machine, or LD_LIBRARY_PATH does not lead to it: install the package that has it, or reinstall the one that needs it; ldd "
        "shows what is missing",
        says=r"cannot open shared object file",
        per_node=True,
    ),
    Rule(
        "HF212",
        "cannot load a library: {said}",
        "what was compiled for another CUDA, torch, numpy or glibc must be reinstalled in this environment; pip check, ldd",
        says=r"undefined symbol|GLIBC(?:XX)?_[\d.]+. not found|not found \(required by|compiled (?:with|using|against|for)"
        r" .{0,60}(?:numpy|torch|CUDA|version|module)|size changed, may indicate binary|invalid ELF|wrong ELF|symbol lookup error"
        r"|_ARRAY_API not found|binary incompatib|mismatches the version|operator \S+ does not exist|ABI version|numpy\.\w+\.multiarray failed|^RuntimeError: Numpy is not available|in static TLS block|compiled with different versions"
        r"|VersionConflict|is required for a normal functioning|\bbut found \S+==\S|requires? [\w.-]+ ?[<>=!~]=? ?\d[\w.]*.{0,60}\b(?:installed|you have|found version)\b"
        r"|CUDA_HOME (?:environment variable )?is not set|nvcc(?: was)? not found"
        r"|\b(?:incompatible|unsupported) versions? of\b",
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
        "imports a file of its own in place of a library: {said}",
        "rename the script's own file or folder that has the library's name (ls ./torch.py), and remove its __pycache__",
        says=r"; '\w+' is not a package|consider renaming '|partially initialized module"
        r"|module 'torch' has no attribute '(?:nn|cuda|tensor|Tensor|optim|utils|device|distributed|manual_seed|no_grad|save|load|__version__)'"
        r"|cannot import name .{0,60} from '\w+' \((?!.*/(?:site|dist)-packages/).{0,300}/(?:torch|numpy|datasets|transformers|accelerate|random|typing|logging)"
        r"(?:\.py|/__init__\.py)\)",
        only=OWN,
        facts=("hides",),
        per_node=True,
    ),
    Rule(
        "HF211",
        "imports a file of its own in place of a library: {said}",
        "rename the script's own file or folder that has the library's name, and remove its __pycache__",
        says=r"^(?:AttributeError: (?:partially initialized )?module '|ImportError: cannot import name |ModuleNotFoundError: No module named ')",
        known="hides",
        only=OWN,
        facts=("hides",),
        per_node=True,
    ),
    Rule(
        "HF211",
        "cannot import what the script needs: {said}",
        "the same environment on every node: pip install it there, or mount one environment everywhere",
        says=r"No module named|cannot import name|seems to be not installed|is not installed|package .{0,40}(?:not found|is required)",
        types=types_of("ModuleNotFoundError ImportError PackageNotFoundError"),
        only=OWN,
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
        r"|not a (?:zip|checkpoint) file|unexpected EOF|file might be corrupted"
        r"|(?:missing|unexpected|unmatched) (?:key|param|weight|tensor)\w*\b.{0,80}(?:state_?dict|checkpoint)|(?:missing|absent|not found) (?:in|from) (?:the )?(?:checkpoint|state_?dict)"
        r"|checkpoint.{0,60}(?:corrupt|damaged|incompatible|does not match (?:the |this |your )?(?:model|architecture|optim|network|size|shape|current))"
        r"|storage has wrong byte size|^(?!.*(?:No such file|not found|does not exist)).*(?:could not|cannot|can't|unable to|fail\w* to|error) (?:load|read|restor|resum)\w*\b.{0,40}\b(?:checkpoint|weights|state_?dict)\b",
        types=types_of(
            "UnpicklingError SafetensorError BadZipFile CheckpointException SnapshotDamagedError NoValidSnapshotError"
        ),
    ),
    Rule(
        "HF218",
        "may not do what it tried: {said}",
        "owner and mode of that path for the user who runs the job, read-only mounts, the container's security profile",
        says=r"Permission denied|readonly database|\bPermissionError\b|[ '\"]"
        + PATH_WITH_SLASH
        + r".{0,60}\baccess (?:is |was )?denied|Operation not permitted|Read-only file system|Errno (?:1|13|30)\]|\bE(?:ACCES|PERM|ROFS)\b",
        types=types_of("PermissionError"),
        per_node=True,
    ),
    Rule(
        "HF217",
        "met a file system that fails: {said}",
        "dmesg and the mount on that node (NFS server, FUSE daemon); remount it",
        says=r"Stale file handle|Input/output error|Transport endpoint is not connected|Errno (?:5|107|108|112|116|117|121)\]|Remote I/O error|Structure needs cleaning|No such device or address",
        per_node=True,
    ),
    Rule(
        "HF217",
        "does not find a file: {said}",
        "every node needs the file under the same path: a shared folder, or a copy on each; a relative path counts from where the job was started",
        says=r"No such file or directory|unable to open database file|\bno files? (?:named|found|matching)\b|not found or corrupted|does not appear to have (?:a )?files? named|\bno (?:[\w()-]+ ){0,3}\w+ (?:were |was )?found in ['\"]?"
        + PATH_WITH_SLASH
        + r"|can't open file|Errno 2\]|\b(?:file|directory|folder) (?:was )?not found"
        rf"|^(?!.*{NO_FILES})(?:.*\s)?(?:parent )?(?:file|directory|folder|path)s?[ :]+['\"]?{PATH}['\"]? {GONE}"
        rf"|^(?!.*{NO_FILES})(?:.*[\s'\"])?(?:{PATH_WITH_SLASH}|{PATH_WITH_ENDING})['\"]? {GONE}"
        rf"|(?:(?:not|n't|cannot|unable to|no) (?:find|open|locate|read|access)|not found|no \w* ?files?)\b[^\n/]{{0,40}}[ '\"]{PATH_WITH_SLASH}",
        types=types_of("FileNotFoundError NotADirectoryError IsADirectoryError DataFilesNotFoundError"),
        per_node=True,
    ),
)
