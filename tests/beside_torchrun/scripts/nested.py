"""A worker that is a launcher: runs the installed torchrun, or holdfast, with all that it inherited (PET_* too)."""

import os
import subprocess
import sys

launcher, *line = sys.argv[1:]
module = {"torchrun": ["torch.distributed.run"], "holdfast": ["holdfast.run"]}[launcher]
sys.exit(subprocess.run([sys.executable, "-m", *module, *line], env=dict(os.environ), check=False).returncode)
