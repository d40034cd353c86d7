"""The load of every node: processors, memory, disk, network, GPUs. A part of `status` and of the page."""
