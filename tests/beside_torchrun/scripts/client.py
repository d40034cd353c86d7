"""What a third party does with a launcher: asks who started it, meets its peers in every way, and starts launchers itself.

Prints one line of JSON per rank, in which nothing may differ between launchers.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
said = {
    "launched": dist.is_torchelastic_launched(),
    "available": dist.is_available(),
    "argv": sys.argv[1:],
}

# A client of the launcher's store, beside the process group.
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
    own = dist.TCPStore(address, port, world, is_master=False, timeout=timedelta(seconds=60))
    own.set(f"mine/{rank}", f"hello from {rank}")
    said["peer"] = own.get(f"mine/{(rank + 1) % world}").decode()
    said["count"] = [own.add("count", 0) >= 0, own.check([f"mine/{rank}"]), own.check(["nothing"])]
    prefixed = dist.PrefixStore("a prefix", own)
    prefixed.set("key", "value")
    prefixed.wait(["key"], timedelta(seconds=60))

dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=60))
said["group"] = [dist.get_rank() == rank, dist.get_world_size() == world, dist.get_backend()]
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
said["sum"] = total.item()
groups = [dist.new_group([one]) for one in range(world)] + [dist.new_group(list(range(world)))]
gathered = [None] * world
dist.all_gather_object(gathered, f"object {rank}", group=groups[-1])
said["gathered"] = gathered
said["alone"] = dist.get_world_size(groups[rank])
dist.barrier()
dist.destroy_process_group()
print("client", json.dumps(said), flush=True)
