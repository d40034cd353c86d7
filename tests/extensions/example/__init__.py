"""An extension that nobody needs: `where` shows the working folder of every node's agent.

It is what one has to write for a new question to a running job, and it needs no change in src. Its line in the list of
extensions is `EXAMPLE`, which the tests pass to the agents that they start.
"""

from holdfast.extension_list import Extension

EXAMPLE = Extension("example", questions=("where",), package="tests.extensions")
