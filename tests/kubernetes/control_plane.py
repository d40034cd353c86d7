"""A real Kubernetes API server on loopback, with an etcd of its own, and the controllers if they are there.

The programs are taken from the folder in KUBEBUILDER_ASSETS (what setup-envtest fills), then from PATH. Definitions of
custom resources (CRDs) are taken from the folder in TEST_KUBERNETES_CRDS: they belong to other projects, and their
webhooks, which run in a cluster, are left out.

Knows nothing of jobs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.limits import limit_s, until

ASSETS, DEFINITIONS = "KUBEBUILDER_ASSETS", "TEST_KUBERNETES_CRDS"
SERVER, CONTROLLERS = "kube-apiserver", "kube-controller-manager"
TOKEN = "administrator-of-the-tests"
READY_S = 60.0

Object = dict[str, Any]


def program(name: str) -> str | None:
    """Its path."""
    return shutil.which(name, path=os.environ.get(ASSETS)) or shutil.which(name)


def why_not() -> str:
    """Why this machine cannot start a server; empty when it can."""
    missing = [name for name in (SERVER, "etcd", "openssl") if program(name) is None]
    return f"NOT TESTED: no {', '.join(missing)} in ${ASSETS} or on PATH" if missing else ""


class RefusedError(Exception):
    """The server's answer is an error; its text is the server's message."""


class ControlPlane:
    """The server of one cluster. Its methods take and give objects as JSON."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self.port = free_port()
        self._free_port = free_port
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._paths: dict[tuple[str, str], tuple[str, bool]] = {}

    def __enter__(self) -> ControlPlane:
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_all(self) -> None:
        client, peer = self._free_port(), self._free_port()
        etcd = f"http://127.0.0.1:{client}"
        self._start(
            *("etcd", "--name=one", f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"),
            *(f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            f"--initial-cluster=one=http://127.0.0.1:{peer}",
        )
        tokens, key = self.folder / "tokens.csv", self.folder / "accounts.key"
        tokens.write_text(f'{TOKEN},administrator,1,"system:masters"\n')
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        controllers = program(CONTROLLERS)
        self._start(
            *(SERVER, f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={self.port}"),
            *(f"--cert-dir={self.folder / 'certificates'}", f"--token-auth-file={tokens}"),
            *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://kubernetes.default.svc", "--endpoint-reconciler-type=none"),
            # Accounts are made by a controller.
            *([] if controllers else ["--disable-admission-plugins=ServiceAccount"]),
        )
        until(self._ready, self.story, READY_S)
        if controllers:
            self._start(
                *(CONTROLLERS, f"--kubeconfig={self.kubeconfig()}", f"--service-account-private-key-file={key}"),
                *("--bind-address=127.0.0.1", f"--secure-port={self._free_port()}", "--leader-elect=false"),
                *("--use-service-account-credentials=false", f"--cert-dir={self.folder / 'certificates'}"),
            )

    def _start(self, name: str, *words: str) -> None:
        path = program(name)
        assert path is not None, name
        with (self.folder / f"{name}.log").open("wb") as log:
            started = subprocess.Popen([path, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._started.append((name, started))

    def _ready(self) -> bool:
        for name, process in self._started:
            assert process.poll() is None, f"{name} has ended:\n{self.story()}"
        try:
            return self.raw("GET", "/readyz") == b"ok"
        except (OSError, RefusedError):
            return False

    def close(self) -> None:
        """End all that was started, the newest first."""
        for _, process in reversed(self._started):
            process.send_signal(signal.SIGKILL)
            process.wait(limit_s(20))
        self._started.clear()

    def story(self) -> str:
        """The ends of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: ...{log.read_text(errors='replace')[-1500:]}" for log in logs)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def certificate(self) -> Path:
        return self.folder / "certificates" / "apiserver.crt"

    def kubeconfig(self) -> Path:
        """A file for kubectl, of the administrator."""
        file = self.folder / "kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        one = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "one",
            "clusters": [{"name": "one", "cluster": cluster}],
            "users": [{"name": "one", "user": {"token": TOKEN}}],
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": "default"}}],
        }
        file.write_text(json.dumps(one))
        return file

    def raw(self, method: str, path: str, body: object = None, kind: str = "application/json") -> bytes:
        """The bytes of the server's answer. Raises RefusedError."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": kind},
        )
        trust = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(self.certificate)))
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({}), trust).open(
                request, timeout=limit_s(20)
            ) as answer:
                read: bytes = answer.read()
                return read
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            try:
                raise RefusedError(json.loads(text)["message"]) from None
            except (ValueError, KeyError):
                raise RefusedError(f"{error.code}: {text[:300]!r}") from None

    def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Object:
        answer: Object = json.loads(self.raw(method, path, body, kind))
        return answer

    @property
    def version(self) -> tuple[int, int]:
        """0.0, if the server was built without one: then it is taken for an old one."""
        told = self.ask("GET", "/version")
        return int(told["major"] or 0), int(told["minor"].rstrip("+") or 0)

    def path_of(self, api: str, kind: str, namespace: str) -> str:
        """Where objects of this kind are; "" if the server does not know the kind."""
        base = f"/apis/{api}" if "/" in api else f"/api/{api}"
        if (api, kind) not in self._paths:
            try:
                found = [each for each in self.ask("GET", base)["resources"] if each["kind"] == kind]
            except RefusedError:
                return ""
            names = [each for each in found if "/" not in each["name"]]
            if not names:
                return ""
            self._paths[api, kind] = (names[0]["name"], names[0]["namespaced"])
        name, namespaced = self._paths[api, kind]
        return f"{base}/namespaces/{namespace}/{name}" if namespaced else f"{base}/{name}"

    def create(self, made: Object, *, namespace: str = "default", dry: bool = False) -> Object:
        """Create the object, as the server stores it. A field that the server does not know is refused."""
        path = self.path_of(made["apiVersion"], made["kind"], made["metadata"].get("namespace", namespace))
        if not path:
            raise RefusedError(f"no kind {made['kind']} in {made['apiVersion']}")
        return self.ask("POST", f"{path}?fieldValidation=Strict{'&dryRun=All' if dry else ''}", made)

    def define(self, folder: Path) -> list[str]:
        """Create all CRDs of the folder. Their names, when the server serves them."""
        names = []
        for definition in definitions(folder):
            definition["spec"].pop("conversion", None)  # by a webhook
            self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
            names.append(definition["metadata"]["name"])
        for name in names:
            until(lambda name=name: self._serves(name), lambda name=name: f"{name}\n{self.story()}", READY_S)
        return names

    def _serves(self, name: str) -> bool:
        found = self.ask("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        served = [each["name"] for each in found["spec"]["versions"] if each["served"]]
        group, kind = found["spec"]["group"], found["spec"]["names"]["kind"]
        established = ("Established", "True") in [
            (each["type"], each["status"]) for each in found.get("status", {}).get("conditions", [])
        ]
        return established and all(self.path_of(f"{group}/{version}", kind, "default") for version in served)


def definitions(folder: Path) -> Iterator[Object]:
    """The CRDs in the files of the folder and the folders below it."""
    for file in sorted(folder.rglob("*.yaml")):
        for document in yaml.load_all(file.read_text(), yaml.CSafeLoader):
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                yield document


def differences(sent: object, stored: object, where: str = "") -> list[str]:
    """What of `sent` is not in `stored`, which may have more: the server adds defaults, and drops what it does not know."""
    if isinstance(sent, Mapping):
        if not isinstance(stored, Mapping):
            return [f"{where}: {sent!r} became {stored!r}"]
        found = []
        for key, value in sent.items():
            if key == "stringData":
                continue  # becomes data
            if key not in stored:
                # An empty value is not stored.
                found += [] if value in ({}, [], "", 0, False, None) else [f"{where}.{key}: was dropped"]
            else:
                found += differences(value, stored[key], f"{where}.{key}")
        return found
    if isinstance(sent, list):
        if not isinstance(stored, list) or len(sent) > len(stored):
            return [f"{where}: {sent!r} became {stored!r}"]
        return [
            one for i, pair in enumerate(zip(sent, stored, strict=False)) for one in differences(*pair, f"{where}[{i}]")
        ]
    # Amounts are stored as text.
    return [] if sent == stored or str(sent) == stored else [f"{where}: {sent!r} became {stored!r}"]
