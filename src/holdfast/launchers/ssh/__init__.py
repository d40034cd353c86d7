"""One command for several hosts: `holdfast run --hosts` starts an agent on each of them through the system's ssh.

    cli/hosts.py ── Launcher (launcher.py)
                      ├── SshSession per host (session.py)  one ssh client; the far side is far.py, sent through it
                      ├── Screen (session.py)               the output of all hosts on one console
                      └── Discovery (hosts.py)              hosts that come and go
    hosts.py: lists of hosts, facts about hosts, and how hosts may differ

The agents are ordinary ones: they form generations and end as if each had been started by hand.
"""
