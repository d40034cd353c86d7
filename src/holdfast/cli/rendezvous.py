"""How the nodes meet: backend, endpoint, job id, ranks of nodes, token, by torchrun's rules.

Knows the rewrite to standalone (explicit and implied) and reports what it discards; opens no socket.
"""

from __future__ import annotations

import os
import stat
import uuid
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.values import node_range
from holdfast.protocol.errors import EndpointError, NodesError, RendezvousConfigError
from holdfast.protocol.options import Endpoint, EtcdOptions, ThirdPartyOptions
from holdfast.protocol.policy import Grow, JobSpec, Limits
from holdfast.rendezvous import conf as rdzv_conf
from holdfast.rendezvous.conf import PORT_MAX, check_backend, default_port, is_built_in, parse_endpoint
from holdfast.runtime.secret_variables import read_token, weakness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.cli.grammar import Parsed

STATIC_PORT = 29500
LOOPBACK = "localhost"


class RendezvousOptions(NamedTuple):
    """The part of RunOptions that is about other nodes."""

    job: JobSpec
    limits: Limits
    endpoint: Endpoint
    standalone: bool
    is_host: bool | None
    token: bytes | None
    node_rank: int | None
    etcd: EtcdOptions | None = None
    third_party: ThirdPartyOptions | None = None


def resolve(parsed: Parsed, environ: Mapping[str, str], *, patience: Limits, notices: list[str]) -> RendezvousOptions:
    """Raises NodesError, EndpointError, RendezvousConfigError or EnvironmentValueError."""
    least, most = nodes(parsed)
    check_backend_name(parsed)
    standalone = is_standalone(parsed, most)
    backend = "c10d" if standalone else parsed.values.rdzv_backend
    foreign = not is_built_in(backend)
    if standalone:
        least, most = alone(parsed, least, most, notices)
        endpoint = Endpoint(host=LOOPBACK, port=0)
    elif foreign:
        say_idle_master(parsed, backend, notices)
        endpoint = Endpoint(host="", port=0)
    else:
        endpoint = meeting_point(parsed, backend, least, most, notices)
    job_id = run_id(parsed, standalone, most, notices)
    third_party = None
    try:
        conf = rdzv_conf.parse_conf(parsed.values.rdzv_conf)
        if foreign:
            third_party = third_party_options(parsed, backend, job_id, conf, notices)
        else:
            notices.extend(rdzv_conf.unknown_key_notices(backend, conf))
        known = rdzv_conf.THIRD_PARTY if foreign else backend
        limits = rdzv_conf.limits_from_conf(known, conf, patience)
        is_host = None if standalone or backend != "c10d" else rdzv_conf.read_is_host(conf)
        etcd = etcd_options(backend, conf, endpoint)
    except RendezvousConfigError as error:
        raise of_variable(parsed, error) from None
    fixed = backend == "static"
    say_open_token(conf.get("token_file"), notices)
    token = read_token(conf.get("token_file"), environ)
    if token is not None and (weak := weakness(token)):
        notices.append(weak)
    return RendezvousOptions(
        job=JobSpec(
            run_id=job_id,
            min_nodes=most if fixed else least,
            max_nodes=most,
            backend=backend,
            max_restarts=parsed.values.max_restarts,
            fixed_ranks=fixed,
            grow=Grow(parsed.values.grow),
            exclude_after=parsed.values.exclude_after,
            requeues=parsed.requeues,
        ),
        limits=limits,
        endpoint=endpoint,
        standalone=standalone,
        is_host=is_host,
        token=token,
        node_rank=node_rank(parsed, standalone, fixed, most, notices),
        etcd=etcd,
        third_party=third_party,
    )


def say_open_token(path: str | None, notices: list[str]) -> None:
    """A file that cannot be read is reported by the function that reads it."""
    try:
        if path is not None and os.stat(path).st_mode & stat.S_IROTH:
            notices.append(f"--rdzv-conf token_file={path}: every user of this machine may read it; chmod 600 it")
    except OSError:
        return


def etcd_options(backend: str, conf: rdzv_conf.Conf, endpoint: Endpoint) -> EtcdOptions | None:
    """None with any other backend. Raises RendezvousConfigError or EndpointError."""
    if backend not in ("etcd", "etcd-v2"):
        return None
    from holdfast.rendezvous.etcd import read_etcd_conf

    return read_etcd_conf(backend, conf, endpoint)


def third_party_options(
    parsed: Parsed, backend: str, job_id: str, conf: rdzv_conf.Conf, notices: list[str]
) -> ThirdPartyOptions:
    """Loads the package that offers this backend and lets it judge what it is given. Raises CallerError."""
    from holdfast.rendezvous.third_party import load_third_party, read_third_party

    try:
        loaded = load_third_party(backend)
    except RendezvousConfigError as error:
        raise of_variable(parsed, error, "rdzv_backend") from error.__cause__
    options = read_third_party(backend, loaded, parsed.values.rdzv_endpoint.strip(), job_id, conf)
    own = tuple(loaded.conf_keys)
    notices.extend(rdzv_conf.unknown_key_notices(rdzv_conf.THIRD_PARTY, conf, name=backend, own=own))
    return options


def nodes(parsed: Parsed) -> tuple[int, int]:
    try:
        return node_range(parsed.values.nnodes)
    except ValueError as error:
        raise parsed.error("nnodes", NodesError, str(error)) from None


def check_backend_name(parsed: Parsed) -> None:
    if parsed.values.standalone:
        return
    try:
        check_backend(parsed.values.rdzv_backend)
    except RendezvousConfigError as error:
        raise of_variable(parsed, error, "rdzv_backend") from None


def of_variable(parsed: Parsed, error: RendezvousConfigError, dest: str = "rdzv_conf") -> Exception:
    """The same error; named after the variable or the file when that brought the value."""
    if parsed.by_variable(dest) or parsed.by_file(dest):
        return parsed.error(dest, RendezvousConfigError, str(error))
    return error


def is_standalone(parsed: Parsed, most: int) -> bool:
    """Whether standalone was given, or is implied by torchrun's rule: no endpoint is given and there is no other
    node."""
    given = parsed.values
    implied = given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None and most == 1
    return bool(given.standalone or implied)


def alone(parsed: Parsed, least: int, most: int, notices: list[str]) -> tuple[int, int]:
    """Node range of a standalone job; reports options that have no effect in it."""
    said = parsed.values.standalone
    if least > 1:
        raise parsed.error("nnodes", NodesError, "--standalone is one node by itself; leave one of the two out")
    if most > 1:
        notices.append(f"{parsed.said('nnodes')} taken as 1: nobody can join a --standalone job")
    idle = [
        parsed.said(dest)
        for dest in ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
        if parsed.given(dest) and not (dest == "rdzv_backend" and parsed.values.rdzv_backend == "c10d")
    ]
    if idle:
        reason = "--standalone" if said else "one node without an endpoint or a --master-port meets nobody"
        notices.append(f"{', '.join(idle)} without effect: {reason}")
    return 1, 1


def meeting_point(parsed: Parsed, backend: str, least: int, most: int, notices: list[str]) -> Endpoint:
    """The coordinator's endpoint. Raises EndpointError."""
    given = parsed.values
    static = backend == "static"
    from_master = static and not given.rdzv_endpoint
    if from_master:
        endpoint = master_endpoint(parsed, most)
        if most > 1 and not parsed.given("master_addr"):
            notices.append(f"no --master-addr: nodes meet at {endpoint}, so only on this machine")
        return endpoint
    say_idle_master(parsed, backend, notices)
    try:
        endpoint = parse_endpoint(given.rdzv_endpoint, default_port(backend))
    except EndpointError as error:
        if parsed.by_variable("rdzv_endpoint") or parsed.by_file("rdzv_endpoint"):
            raise parsed.error("rdzv_endpoint", EndpointError, str(error)) from None
        raise
    if not given.rdzv_endpoint.strip() and most > 1:
        notices.append(f"no --rdzv-endpoint: nodes meet at {endpoint}, so only on this machine")
    if endpoint.port == 0 and least > 1:
        raise parsed.error("rdzv_endpoint", EndpointError, "port 0 is any free port, which other nodes cannot know")
    return endpoint


def say_idle_master(parsed: Parsed, backend: str, notices: list[str]) -> None:
    idle = [parsed.said(dest) for dest in ("master_addr", "master_port") if parsed.given(dest)]
    if idle:
        given = backend == "static"
        reason = "--rdzv-endpoint says where to meet" if given else f"only used with backend static, not {backend}"
        notices.append(f"{', '.join(idle)} without effect: {reason}")


def master_endpoint(parsed: Parsed, most: int) -> Endpoint:
    """--master-addr and --master-port, for static."""
    port = parsed.values.master_port
    if port is None:
        port = STATIC_PORT
    if not 0 <= port <= PORT_MAX:
        raise parsed.error("master_port", EndpointError, f"a port is a number from 0 to {PORT_MAX}")
    if port == 0 and most > 1:
        raise parsed.error("master_port", EndpointError, "port 0 is any free port, which other nodes cannot know")
    try:
        return parse_endpoint(f"{bracketed(parsed.values.master_addr)}:{port}", None)
    except EndpointError as error:
        raise parsed.error("master_addr", EndpointError, str(error)) from None


def bracketed(host: str) -> str:
    """IPv6 addresses are written with and without brackets in the wild."""
    host = host.strip()
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def run_id(parsed: Parsed, standalone: bool, most: int, notices: list[str]) -> str:
    """A standalone job without a name gets a unique one."""
    given: str = parsed.values.rdzv_id
    if given and (parsed.given("rdzv_id") or not standalone):
        return given
    fresh = str(uuid.uuid4())
    if not given:
        risk = "; the nodes will not find each other" if most > 1 else ""
        notices.append(f"{parsed.said('rdzv_id')} is empty, taken as {fresh}{risk}")
    return fresh


def node_rank(parsed: Parsed, standalone: bool, fixed: bool, most: int, notices: list[str]) -> int | None:
    """The group rank that this node wants, binding with static. Raises NodesError."""
    rank: int = parsed.values.node_rank
    if not parsed.given("node_rank"):
        return 0 if fixed else None
    if 0 <= rank < most:
        return rank
    if fixed or rank < 0:
        raise parsed.error(
            "node_rank", NodesError, f"with {most} node{'s' if most > 1 else ''} ranks are 0 to {most - 1}"
        )
    reason = "this job has one node" if standalone else f"ranks are 0 to {most - 1}"
    notices.append(f"{parsed.said('node_rank')} without effect: {reason}")
    return None
