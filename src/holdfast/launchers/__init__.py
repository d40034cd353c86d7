"""Schedulers and hosts that start jobs: what they tell their processes, and what is submitted to them.

    ssh/                   one command for several hosts
    slurm.py               a step's variables, scontrol's answers
    kubernetes.py          a job's manifests; kubernetes_names.py checks what they may hold

Knows nothing of agents.
"""
