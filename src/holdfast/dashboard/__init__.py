"""The dashboard: a web page of a job, in a process of its own beside the coordinator or opened by `holdfast dashboard`.

It reads what the commands read: the agent's control socket and the run folders of its machine. The job needs nothing
from it: whatever a browser, a slow client or a crash of this process does, the agent only answers `status` each second.
"""
