"""Why ssh did not get there, from its own words: one line that names the host and says what to do. PURE."""

from __future__ import annotations

import re

from holdfast.ssh.hosts import HostSpec

SHOWN_CHARACTERS_MAX = 240
TOO_OLD = "too old for holdfast: Python "
"""What a Python says that cannot even read far.py."""

_KEY_FILE = re.compile(r"Offending \S+ key in (\S+)")
_UNREACHABLE = re.compile(
    r"Connection refused|timed out|No route to host|Network is unreachable|Connection closed|Connection reset"
    r"|kex_exchange_identification|Host is down|banner exchange"
)
_TURNED_AWAY = re.compile(r"^(?:kex|ssh)_exchange_identification: ", re.MULTILINE)
_PARTING = re.compile(r"Timeout, server|Connection (?:to|reset|closed)|client_loop|packet_write|Read from remote|ssh: ")
_NOISE = re.compile(r"^(?:@+.*|Warning: Permanently added .*|\s*|\*\*.*)$")


def is_turned_away(text: str) -> bool:
    """By sshd, before it had anything to do with us: it has too many logins at once (MaxStartups), of which a jump host
    sees those to all others."""
    return _TURNED_AWAY.search(text) is not None


def explain(spec: HostSpec, text: str, code: int | None, python: str, limit_s: float, out: str = "") -> str:
    """`text`: ssh's stderr; `code`: its exit code, None: it was given up after `limit_s`; `out`: what came to stdout."""
    return f"host {spec}: {_why(spec, text, code, python, limit_s, out)}"


def _why(spec: HostSpec, text: str, code: int | None, python: str, limit_s: float, out: str) -> str:
    said = last_words(text)
    if "Could not resolve hostname" in text:
        return f"its name does not resolve ({said.rpartition(': ')[2]}); neither ssh_config nor DNS knows it"
    if "IDENTIFICATION HAS CHANGED" in text:
        found = _KEY_FILE.search(text)
        where = f" (known by {found[1]})" if found else ""
        return f"its host key has changed{where}: a new machine, or somebody in between; if it is right: ssh-keygen -R {spec.host}"
    if "Host key verification failed" in text:
        return f"its host key is not known here yet; log in once by hand to check it: ssh {spec}"
    if "Permission denied" in text or "Too many authentication failures" in text:
        return f"no login without a password ({said}); set up a key or an agent until `ssh -o BatchMode=yes {spec} true` works"
    if code is None:
        return f"no login within {limit_s:g} s{f' ({said})' if said else ''}"
    if code == 255 and _UNREACHABLE.search(text):
        return f"cannot be reached by ssh ({said})"
    if code == 255:
        return f"ssh failed ({said or 'it does not say why'})"
    if code in (126, 127):
        return f"{python} cannot be started there ({said}); the same Python environment must be at the same path"
    if code < 0:
        return f"ssh was killed by signal {-code}"
    if said.startswith(TOO_OLD):
        return f"{python} is Python {said.removeprefix(TOO_OLD)} there; install the same environment"
    return f"{python} ended with {code} there before it said anything ({said or last_words(out) or 'nor did anybody else'})"


def last_words(text: str) -> str:
    """The last line that says something.

    >>> last_words("Warning: Permanently added 'a'.\\nssh: no.\\r\\n")
    'ssh: no'
    """
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return lines[-1].rstrip(".")[:SHOWN_CHARACTERS_MAX] if lines else ""


def parting_words(line: str) -> str:
    """What ssh says of a connection that it has lost; empty when the line is not ssh's.

    >>> parting_words("Timeout, server n1 not responding.\\r")
    'Timeout, server n1 not responding'
    """
    return line.strip().rstrip(".")[:SHOWN_CHARACTERS_MAX] if _PARTING.match(line) else ""
