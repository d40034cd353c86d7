"""A real etcd that speaks TLS, with a CA of this test's own: who gets in, and what the others are told."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes_etcd.conftest import Etcd, serving
from tests.processes_etcd.jobs import BOTH, by
from tests.support.limits import limit_s

CA, CERT, KEY = 0, 1, 2
NAMES = {"etcd": ("cacert", "cert", "key"), "etcd-v2": ("ca_cert", "ssl_cert", "ssl_cert_key")}
REFUSAL_S_MAX = 10.0
"""Below the join time-out of these jobs: nobody waits for a certificate to become right."""


@dataclass(frozen=True)
class Papers:
    """A CA, another that signed nothing, and one certificate for both ends: etcd's gateway shows it to etcd itself."""

    folder: Path

    def make(self) -> None:
        (self.folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        fresh = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        for name in ("ca", "stranger"):
            self._openssl(
                "req", "-x509", *fresh, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"
            )
        self._openssl("req", *fresh, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=127.0.0.1")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        self._openssl("x509", "-req", "-in", "own.csr", *signer, "-out", "own.pem", "-extfile", "names")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def of(self, backend: str, *, ca: str = "ca.pem", own: bool) -> tuple[str, ...]:
        """--rdzv-conf items."""
        names = NAMES[backend]
        mine = (f"{names[CERT]}={self.path('own.pem')}", f"{names[KEY]}={self.path('own.key')}") if own else ()
        return ("protocol=https", f"{names[CA]}={self.path(ca)}", *mine)

    def context(self) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=self.path("ca.pem"))
        made.load_cert_chain(self.path("own.pem"), self.path("own.key"))
        return made

    def _openssl(self, *args: str) -> None:
        done = subprocess.run(["openssl", *args], cwd=self.folder, capture_output=True, text=True, timeout=limit_s(20))
        assert done.returncode == 0, done.stderr


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    made = Papers(tmp_path)
    made.make()
    return made


def _secured(papers: Papers, *more: str) -> tuple[str, ...]:
    return ("--enable-v2=true", "--cert-file", papers.path("own.pem"), "--key-file", papers.path("own.key"), *more)


@pytest.fixture
def etcd_tls(tmp_path_factory, free_port: Callable[[], int], papers: Papers) -> Iterator[Etcd]:
    """It shows a certificate and asks for none."""
    yield from serving(tmp_path_factory, free_port, 1, *_secured(papers), tls=papers.context())


@pytest.fixture
def etcd_mutual(tmp_path_factory, free_port: Callable[[], int], papers: Papers) -> Iterator[Etcd]:
    """It lets in only who shows a certificate of the CA."""
    more = ("--client-cert-auth", "--trusted-ca-file", papers.path("ca.pem"))
    yield from serving(tmp_path_factory, free_port, 1, *_secured(papers, *more), tls=papers.context())


def meet(job_folder, etcd: Etcd, backend: str, *conf: str) -> None:
    script = job_folder.script("meet()")
    agents = [job_folder.start(*by(backend, etcd.endpoint, "2", *conf), script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    assert len(job_folder.trail("up", world=2)) == 2


def refused(job_folder, etcd: Etcd, backend: str, *conf: str) -> str:
    """The one line about it."""
    code, agent = job_folder.run(
        *by(backend, etcd.endpoint, "1", *conf), job_folder.script("meet()"), limit_s=REFUSAL_S_MAX
    )
    assert code == 2, agent.text
    assert "Traceback" not in agent.text
    assert job_folder.trail("up") == []
    (line,) = [line for line in agent.text.splitlines() if "HF120" in line]
    assert etcd.endpoint in line
    return line


@BOTH
def test_the_server_shows_a_certificate(job_folder, papers: Papers, etcd_tls: Etcd, backend: str) -> None:
    wrong = refused(job_folder, etcd_tls, backend, *papers.of(backend, ca="stranger.pem", own=False))
    assert "unable to get local issuer certificate" in wrong
    assert "cacert" in wrong
    assert "protocol=https" in refused(job_folder, etcd_tls, backend)
    meet(job_folder, etcd_tls, backend, *papers.of(backend, own=False))


@BOTH
def test_both_show_a_certificate(job_folder, papers: Papers, etcd_mutual: Etcd, backend: str) -> None:
    missing = refused(job_folder, etcd_mutual, backend, *papers.of(backend, own=False))
    assert "requires a client certificate" in missing
    meet(job_folder, etcd_mutual, backend, *papers.of(backend, own=True))


@BOTH
def test_tls_to_a_server_without(job_folder, papers: Papers, etcd: Etcd, backend: str) -> None:
    assert "does not speak TLS" in refused(job_folder, etcd, backend, *papers.of(backend, own=False))
