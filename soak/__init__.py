"""Holdfast under fire, for as long as one likes: `make soak`.

    python -m soak chaos      four pretend hosts, real agents, gloo training, all faults at random; then torchrun, the same
    python -m soak chaos --worker survive      the same, in ht.survive: workers go on in their processes
    python -m soak patience   two hosts that log 50 MB/s, whose cores are all busy and whose disk stalls: nobody is lost

| module | what it knows |
|---|---|
| training.py | what the training scripts share: the loop of steps, snapshots, and a ledger of every step |
| train.py | the training script: plain DDP; runs under holdfast and torchrun alike |
| survive.py | the same in `ht.survive`: workers go on in their processes |
| plain.py | the same without torch, for the short soak of the tests |
| schedule.py | which fault comes when, from a seed (PURE) |
| launchers.py | how an agent is started, and which processes are what |
| disk.py | a small disk that can be filled and can stall |
| delayline.py | a slow cable |
| rig.py | pretend hosts, their agents, and the faults |
| ledger.py | reads what the workers and the rig wrote |
| checker.py | what must be true of it (PURE; knows nothing of holdfast) |
| figures.py | effective training time, pauses by kind of fault (PURE) |
| report.py | the table and the result file |
| story.py | all that was written in a run, in one order |
| patience.py, chatty.py | the second soak, and its worker |

The checker believes only what the workers wrote about themselves and what the rig did: never a journal of the system
under test. Needs root on Linux, the tools of tests/network/hosts.py, losetup, mkfs.ext4 and /dev/net/tun.
"""
