"""Snapshots of `holdfast.train` in other libraries' training loops: one module for each library, one line in a script.

Each module needs its library, and says which extra installs it. Nothing else of holdfast imports this package.
"""

from __future__ import annotations

from holdfast.protocol.errors import MissingPackageError


def missing(extra: str, error: ImportError) -> MissingPackageError:
    """The error for a module whose library cannot be imported. `extra`: the extra that installs it."""
    return MissingPackageError(
        f"holdfast.train.integrations.{extra} needs a package ({error}): pip install 'holdfast[{extra}]'"
    )
