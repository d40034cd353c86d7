"""holdfast launches distributed training and keeps it going.

Importing the package costs nothing: the public names load what they need on first use (PEP 562).
"""

from __future__ import annotations

from holdfast.version import __version__

__all__ = ["__version__"]
