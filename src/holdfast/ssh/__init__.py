"""One command for several hosts: `holdfast run --hosts` starts an agent on each of them through the system's ssh.

    cli/hosts.py ── Launcher (launcher.py)
                      ├── Session per host (session.py)  one ssh client; the far side is far.py, sent through it
                      ├── Screen (screen.py)             what all hosts write, on one console
                      └── Discovery (discovery.py)       hosts that come and go
    pure: hosts.py (lists of hosts), complaints.py (ssh's words), facts.py (what differs between hosts), orders.py (data)

The agents are ordinary ones: they meet, form worlds and end as if each had been started by hand.
"""
