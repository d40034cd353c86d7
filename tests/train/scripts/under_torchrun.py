"""torchrun's own agent, rendezvous and store; its workers are forked from it, which saves each of them an import of torch.

under_torchrun.py OPTIONS SCRIPT ARGUMENTS     as torchrun's command line
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser


def work(script: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise  # else torchrun would wait for what the function returns


if __name__ == "__main__":
    options = get_args_parser().parse_args(sys.argv[1:])
    if options.standalone:  # as torchrun's main function has it
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
    config, _, _ = config_from_args(options)
    config.start_method = "fork"
    elastic_launch(config, work)(options.training_script, *options.training_script_args)
