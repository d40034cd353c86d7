"""One command for several hosts: `holdfast run --hosts` starts an agent on each of them through the system's ssh.

    cli/hosts.py ── Launcher (launcher.py)
                      ├── Session per host (session.py)  one ssh client; the far side is far.py, sent through it
                      ├── Screen (screen.py)             what all hosts write, on one console
                      └── Discovery (hosts.py)           hosts that come and go
    hosts.py: lists of hosts; facts.py: what the launcher is asked for, and what differs between hosts

The agents are ordinary ones: they meet, form worlds and end as if each had been started by hand.
"""
