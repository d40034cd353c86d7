"""`--rdzv-conf` of the etcd backends to EtcdOptions. Reads the password file and looks for the TLS files; no sockets."""

from __future__ import annotations

import os

from holdfast.core.errors import RendezvousConfigError
from holdfast.core.options import Endpoint, EtcdOptions
from holdfast.rendezvous.conf import Conf, parse_endpoint, read_conf
from holdfast.rendezvous.registry import default_port

PASSWORD_BYTES_MAX = 4096
_FILES = {
    "etcd": {"ca_file": "cacert", "cert_file": "cert", "key_file": "key"},
    "etcd-v2": {"ca_file": "ca_cert", "cert_file": "ssl_cert", "key_file": "ssl_cert_key"},
}
"""torchrun spells them differently for its two backends."""


def read_etcd_conf(backend: str, conf: Conf, endpoint: Endpoint) -> EtcdOptions:
    """Raises RendezvousConfigError or EndpointError for the first value that cannot be meant."""
    values = read_conf(backend, conf)
    files = {field: _file(conf, key) for field, key in _FILES[backend].items()}
    tls = values.get("protocol") == "https"
    idle = [_FILES[backend][field] for field, path in files.items() if path is not None]
    if idle and not tls:
        raise RendezvousConfigError(f"--rdzv-conf {idle[0]} needs protocol=https beside it")
    if files["key_file"] is not None and files["cert_file"] is None:
        names = _FILES[backend]
        raise RendezvousConfigError(f"--rdzv-conf {names['key_file']} needs {names['cert_file']} beside it")
    lease_ttl_s = values.get("lease_ttl", 5)
    assert isinstance(lease_ttl_s, int)
    return EtcdOptions(
        api="v2" if backend == "etcd-v2" else "v3",
        endpoints=_endpoints(backend, conf, endpoint),
        prefix="/" + conf.get("etcd_prefix", "holdfast").strip("/"),
        lease_ttl_s=lease_ttl_s,
        tls=tls,
        user=conf.get("user"),
        password=_password(conf),
        **files,
    )


def _endpoints(backend: str, conf: Conf, endpoint: Endpoint) -> tuple[Endpoint, ...]:
    """--rdzv-endpoint first, then `endpoints=host:port;host:port`, each once."""
    more = [text for text in conf.get("endpoints", "").split(";") if text.strip()]
    return tuple(dict.fromkeys([endpoint, *(parse_endpoint(text, default_port(backend)) for text in more)]))


def _file(conf: Conf, key: str) -> str | None:
    path = conf.get(key)
    if path is None:
        return None
    try:
        with open(path, "rb"):
            return os.path.abspath(path)
    except OSError as error:
        raise RendezvousConfigError(f"--rdzv-conf {key}={path}: {error.strerror}") from None


def _password(conf: Conf) -> str | None:
    path, given = conf.get("password_file"), conf.get("password")
    if (path is not None or given is not None) and "user" not in conf:
        raise RendezvousConfigError("--rdzv-conf has a password for etcd but no user=")
    if path is None:
        return given
    if given is not None:
        raise RendezvousConfigError("--rdzv-conf password and password_file both; leave one out")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(PASSWORD_BYTES_MAX).rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RendezvousConfigError(f"--rdzv-conf password_file={path}: {reason}") from None
