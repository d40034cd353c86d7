"""Imports torch once. For each line of standard input, a case of collective_rank.py, it forks the ranks of a job.

Prints their pids. The next line says `kill`, or `wait` for ranks that end by themselves; then it prints their exit codes.

Usage: collective_cases.py BOOTSTRAP ENVIRONMENTS FOLDER
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
            rank = environment["RANK"]
            os.environ.update(environment, TORCHELASTIC_ERROR_FILE=f"{folder}/error{number}.{rank}")
            os.dup2(os.open(f"{folder}/stderr{number}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
            script = os.path.join(os.path.dirname(__file__), "collective_rank.py")
            sys.argv = [bootstrap, "script", script, case.strip(), f"{folder}/store{number}"]
            runpy.run_path(bootstrap, run_name="__main__")
            sys.exit()
        pids.append(pid)
    print(*pids, flush=True)
    if sys.stdin.readline() == "kill\n":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
