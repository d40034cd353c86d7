"""Prints why `ht.survive` cannot make sharded models again with this torch; nothing if it can."""

from holdfast.train import torch_private

print(torch_private.mesh_names_missing())
