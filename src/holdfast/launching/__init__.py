"""`holdfast.launch`: functions instead of scripts, under the same agent, supervisor and rendezvous as `holdfast run`.

    api       the public function: parameters to a command line, the end of the job to results or an exception; the call
              and the answers, pickled in memory files
    agent     the program of the agent's process
    session   that process, from start to end, as the caller sees it: console, interrupts, time-out

Nobody but `holdfast/__init__.py` imports this package.
"""
