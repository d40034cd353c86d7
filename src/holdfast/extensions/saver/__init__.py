"""The process that writes snapshots from memory to disk, and the exchange of states between nodes."""
