"""The doctor checks what a job needs, before it runs.

findings.py                      findings and facts as plain data, and how findings are shown
facts.py ──► local.py            one node: gather facts, judge them
machine_reader.py ──► gpu_rules.py, device_events.py
                                 its GPUs and network ports: read them, judge them; machine_state.py is what is read
network_cards.py                 reads the counters of its network cards while workers run
gpu_full.py                      judges what its GPUs have computed and copied (train/gpu_checkup.py)
majority.py                      the same of several nodes: who differs; slow_pairs.py: who is slow
joint.py, joint_server.py ──► together.py
                                 several nodes: meet, measure, judge; probe.py measures the network between two
"""
