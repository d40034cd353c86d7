"""`holdfast.launch`: functions instead of scripts, under the same agent, supervisor and rendezvous as `holdfast run`.

    api             the public function: parameters to a command line, the end of the job to results or an exception;
                    the call and the answers, pickled in memory files
    agent           the program of the agent's process
    agent_session   that process, from start to end, in the caller: console, interrupts, time-out

Only `holdfast/__init__.py` imports this package.
"""
