"""Without the optional package there is one line that names what to install."""

from __future__ import annotations

import sys

import pytest

from holdfast.protocol.errors import MissingPackageError
from holdfast.protocol.options import Endpoint, EtcdOptions
from holdfast.rendezvous.etcd import open_api


def test_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    options = EtcdOptions(api="v3", endpoints=(Endpoint(host="127.0.0.1", port=1),))
    with pytest.raises(MissingPackageError, match=r"pip install 'holdfast\[etcd\]'") as caught:
        open_api(options, "job")
    assert "\n" not in str(caught.value)
