"""The job's secret: from the file that --rdzv-conf names, else from HOLDFAST_TOKEN. Reads; tells nobody."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.errors import EnvironmentValueError, RendezvousConfigError

TOKEN_BYTES_MAX = 4096
TOKEN_VARIABLE = "HOLDFAST_TOKEN"
TOKEN_CHARS_MIN = 20
"""Shorter ones are warned about: a handshake tells enough to try all of them offline."""
TOKEN_BYTES = 32
"""Of randomness, in one that we draw."""


def read_token(path: str | None, environ: Mapping[str, str]) -> bytes | None:
    """The job's secret: the file that --rdzv-conf names, else HOLDFAST_TOKEN, else none.

    Raises RendezvousConfigError or EnvironmentValueError when it is announced and empty: silence would mean no token.
    """
    if path is not None:
        return _from_file(path)
    text = environ.get(TOKEN_VARIABLE)
    if text is None:
        return None
    secret = text.rstrip("\r\n").encode(errors="surrogateescape")
    if not secret:
        raise EnvironmentValueError(f"{TOKEN_VARIABLE} is empty; unset it for a job without a token")
    return secret


def _from_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read(TOKEN_BYTES_MAX + 1).rstrip(b"\r\n")
    except OSError as error:
        raise RendezvousConfigError(f"--rdzv-conf token_file={path}: {error.strerror}") from None
    if not secret:
        raise RendezvousConfigError(f"--rdzv-conf token_file={path}: the file is empty")
    if len(secret) > TOKEN_BYTES_MAX:
        raise RendezvousConfigError(f"--rdzv-conf token_file={path}: longer than {TOKEN_BYTES_MAX} bytes")
    return secret


def draw_token() -> str:
    """A new one that nobody can guess: letters and digits, fit for a file, a variable and a Secret."""
    import secrets  # only who draws one pays for it

    return secrets.token_hex(TOKEN_BYTES)


def weakness(secret: bytes) -> str:
    """What to say of a token that can be guessed; empty when it is long enough."""
    if len(secret) >= TOKEN_CHARS_MIN:
        return ""
    return (
        f"the job token has {len(secret)} characters: anyone who reaches the endpoint can guess it offline; "
        "`holdfast token` draws one that cannot be guessed"
    )
