"""A worker that goes on in other generations, without torch: the worker's side of the channel.

Arguments: RANK=WORD …, how a local rank behaves: `deaf` never leaves its generation, `starved` neither: it computes
beside another process on one processor; `refuses` says that it cannot go on, `returns` that its function has returned;
`family` has a child that outlives it, `stubborn` one in a session of its own, and both ignore SIGTERM; `late` says that
it went on when the next regroup has begun. A replacement behaves well. Prints a line for each thing that it does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

path = os.environ["HOLDFAST_BOARD"].rpartition("@")[0]
replacement = os.environ.pop("HOLDFAST_REPLACEMENT", "") == "1"
how = {} if replacement else dict(argument.split("=") for argument in sys.argv[1:])
word = how.get(os.environ["LOCAL_RANK"], "")


def say(*words):
    print(*words, flush=True)


def place():
    return " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


if word == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits it
if word in ("family", "stubborn"):
    apart = word == "stubborn"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=apart)
    say("child", child.pid)
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect(b"\0holdfast-board-%d" % os.stat(path).st_ino)


def tell(**message):
    channel.send(json.dumps(message).encode())


def went_on(generation):
    tell(**{"is": "went_on", "generation": generation, "step": 7, "steps_lost": 0, "seconds": 0.1})


say("up", place())
generation = 0
tell(**({"is": "ready"} if replacement else {"is": "can_go_on", "generation": 0}))
print("said", file=sys.stderr, flush=True)
while packet := channel.recv(65536):
    message = json.loads(packet)
    if message["do"] == "release":
        say("released", message["generation"], "now" if message["at_once"] else "later")
        if word == "deaf":
            time.sleep(1000)
        elif word == "starved":
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            while True:
                pass
        elif word == "refuses":
            tell(**{"is": "refuse", "why": "it grew"})
        elif word == "returns":
            tell(**{"is": "unable"})
        else:
            if word == "late" and generation:
                went_on(generation)
            tell(**{"is": "waits", "generation": message["generation"]})
    else:
        os.environ.update(message["environment"])
        generation = message["generation"]
        say("goes on", generation, place())
        tell(**{"is": "can_go_on", "generation": generation})
        if word != "late":
            went_on(generation)
