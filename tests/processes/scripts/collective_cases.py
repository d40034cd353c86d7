"""Imports torch once. For each line of standard input, a case of collective_rank.py, it forks the ranks of a job that hang in it.

Prints their pids, and ends them before the next case. Usage: collective_cases.py BOOTSTRAP ENVIRONMENTS FOLDER
"""

import json
import os
import runpy
import signal
import sys

bootstrap, environments, folder = sys.argv[1:]
for number, case in enumerate(iter(sys.stdin.readline, "")):
    pids = []
    for environment in json.loads(environments):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.environ.update(environment)
            script = os.path.join(os.path.dirname(__file__), "collective_rank.py")
            sys.argv = [bootstrap, "script", script, case.strip(), f"{folder}/store{number}"]
            runpy.run_path(bootstrap, run_name="__main__")
            sys.exit()
        pids.append(pid)
    print(*pids, flush=True)
    sys.stdin.readline()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print("gone", flush=True)
