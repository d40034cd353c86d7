"""Manual clock, fake network and simulated clusters, shipped so that users can test their policies."""
