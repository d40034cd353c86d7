"""Secrets in our environment: read once, then taken out of it, so that no program that is started finds them there.

Light: the keeper uses it before anything heavy is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from holdfast.rendezvous.token import TOKEN_VARIABLE

_MAY_HOLD_ONE = {
    "PET_RDZV_CONF": re.compile(r"(?:^|,)\s*password="),
    "PET_RDZV_ENDPOINT": re.compile(r"://[^/@\s]*:[^/@\s]+@"),
}
"""etcd's password, where somebody gives it in a variable."""


def secret_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables of ours that hold a secret here."""
    held = [name for name, secret in _MAY_HOLD_ONE.items() if secret.search(environ.get(name, ""))]
    return [*([TOKEN_VARIABLE] if TOKEN_VARIABLE in environ else []), *held]


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """For a program that is no part of ours."""
    hidden = secret_variables(environ)
    return {name: value for name, value in environ.items() if name not in hidden}


def forget_secrets() -> None:
    """Take them out of this process's environment, once they are read: whatever it starts has them no more. They are
    overwritten in memory too, where /proc/PID/environ would show them to every process of this user."""
    names = secret_variables(os.environ)
    if not names:
        return
    import ctypes  # milliseconds that only a job with a token pays

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in names:
        place = libc.getenv(name.encode())
        if place:
            ctypes.memset(place, ord("*"), len(os.environb[name.encode()]))
        del os.environ[name]
