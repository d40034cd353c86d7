"""How findings are made, and how numbers in them are written. PURE."""

from __future__ import annotations

from holdfast.core.doctor import DoctorFinding, Level
from holdfast.text import listed

KIB, MIB, GIB = 2**10, 2**20, 2**30


def passed(code: str, what: str, why: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.PASS, what=what, why=why)


def warn(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.WARN, what=what, why=why, fix=fix)


def retry(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.RETRY, what=what, why=why, fix=fix)


def fatal(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.FATAL, what=what, why=why, fix=fix)


def size(bytes_: float) -> str:
    """`1.5 GiB`, `64 MiB`."""
    if bytes_ >= GIB:
        return f"{bytes_ / GIB:.3g} GiB" if bytes_ < 1000 * GIB else f"{bytes_ / GIB / 1024:.3g} TiB"
    return f"{bytes_ / MIB:.3g} MiB" if bytes_ >= MIB else f"{bytes_ / KIB:.3g} KiB"


def rate(bytes_s: float) -> str:
    """As networks are sold: `940 Mbit/s`."""
    bits = bytes_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def span(seconds: float) -> str:
    """`0.12 ms`, `3.4 s`."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def named(names: list[str] | tuple[str, ...], shown_max: int = 6) -> str:
    """`a, b and 4 more`."""
    return listed(names, shown_max)
