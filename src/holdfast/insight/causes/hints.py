"""What to do about exceptions that have no code of their own. Pure: words, and the advice."""

from __future__ import annotations

HINTS: tuple[tuple[str, str], ...] = (
    (
        r"Expected all tensors to be on the same device",
        "move model and batch to cuda:LOCAL_RANK; a bare .cuda() means GPU 0 on every rank",
    ),
    (
        r"process group (?:has not been|is not) initialized",
        "call torch.distributed.init_process_group() first, or use holdfast.train.process_group",
    ),
    (
        r"initialize the default process group twice",
        "one init_process_group per process: a library has called it already",
    ),
    (
        r"^(?:SyntaxError|IndentationError|TabError)",
        "this Python cannot read the script: python -m py_compile, and the same Python on all nodes",
    ),
    (
        r"freeze_support|bootstrapping phase",
        "spawned processes import the script again: put its start under if __name__ == '__main__':",
    ),
    (
        r"(?:modified by an|is at version \d+; expected) .{0,40}(?:inplace|version)",
        "a tensor was changed in place before backward; under DDP buffers are: broadcast_buffers=False",
    ),
    (
        r"^IndexError: index out of range in self",
        "an embedding was given an index beyond its table: compare the tokenizer's and the model's vocabularies",
    ),
    (
        r"out of resource: shared memory",
        "a Triton kernel wants more shared memory than this GPU has: smaller blocks, fewer stages, or another GPU",
    ),
    (
        r"^(?:bdb\.)?BdbQuit",
        "a breakpoint without a terminal: workers have no stdin; take it out, or run the script alone, without holdfast",
    ),
    (
        r"BrokenProcessPool|terminated abruptly|TerminatedWorkerError",
        "a process of its pool was killed, mostly for lack of memory, or crashed: fewer processes, and their own words on stderr",
    ),
    (r"returned non-zero exit status|CalledProcessError", "the program it called failed: its own words are on stderr"),
)
"""For exceptions that have no code of their own: words, and what to do."""
