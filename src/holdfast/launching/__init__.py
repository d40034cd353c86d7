"""`holdfast.launch`: functions instead of scripts, under the same agent, supervisor and rendezvous as `holdfast run`.

    api             the public function: parameters to a command line, the end of the job to results or an exception;
                    the call and the answers are pickled in memory files
    agent_session   the agent's process as the caller sees it: start, console, interrupts, time-out; its program is in
                    cli/run.py

Only `holdfast/__init__.py` imports this package.
"""
