"""The doctor's hands: facts of this node, the meeting of several, and what is tried between each two of them."""
