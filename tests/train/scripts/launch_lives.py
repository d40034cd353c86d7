"""The launcher of lives.py: lives one after the other, forked from one process. launch_lives.py COUNT CASE FOLDER"""

import os
import runpy
import sys
from pathlib import Path

count, *arguments = sys.argv[1:]
for life in range(int(count)):
    pid = os.fork()
    if pid == 0:
        os.environ.update(LOCAL_RANK="0", TORCHELASTIC_RESTART_COUNT=str(life))
        sys.argv[1:] = [*arguments, str(life)]
        runpy.run_path(str(Path(__file__).with_name("lives.py")), run_name="__main__")
        break
    os.waitpid(pid, 0)
    print(flush=True)
