"""Resolves the options of the rendezvous by torchrun's rules: backend, endpoint, job id, node ranks, token.

Decides when a job is standalone (explicit or implied), and reports options that have no effect. Opens no socket.
"""

from __future__ import annotations

import os
import stat
import uuid
from typing import TYPE_CHECKING, NamedTuple

from holdfast.inherited import read_token, weakness
from holdfast.protocol.charter import Electorate, electorate
from holdfast.protocol.errors import (
    EndpointError,
    HoldfastError,
    NodesError,
    RendezvousConfigError,
    SubmitError,
    UsageError,
)
from holdfast.protocol.options import Endpoint, EtcdOptions, SharedValueOptions
from holdfast.protocol.policy import Grow, JobSpec, Limits
from holdfast.protocol.train_contract import Survive
from holdfast.rendezvous import conf as rdzv_conf
from holdfast.rendezvous.backends import check_backend, default_port, has_shared_value
from holdfast.rendezvous.conf import LOOPBACK, PORT_MAX, parse_endpoint
from holdfast.text import PASSWORD_IN_URL, is_loopback, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.options import RunOptions

STATIC_PORT = 29500
ENDPOINTS_MAX = 16


class RendezvousOptions(NamedTuple):
    """The fields of RunOptions about other nodes."""

    job: JobSpec
    limits: Limits
    endpoint: Endpoint
    standalone: bool
    is_host: bool | None
    token: bytes | None
    node_rank: int | None
    etcd: EtcdOptions | None
    shared_value: SharedValueOptions | None
    more_endpoints: tuple[Endpoint, ...]
    succession: bool
    agent_port: int


def conf_to_publish(parsed: Parsed, place: str) -> dict[str, str]:
    """The settings of --rdzv-conf for a file that others can read. `place`: that file, and what to use instead. Raises
    UsageError, and SubmitError for a password in them or in --rdzv-endpoint."""
    try:
        conf = rdzv_conf.parse_conf(parsed.values.rdzv_conf)
    except RendezvousConfigError as error:
        raise UsageError(str(error)) from None
    if "password" in conf:
        raise SubmitError(f"--rdzv-conf password=...: would be readable in {place}")
    if PASSWORD_IN_URL.search(parsed.values.rdzv_endpoint):
        raise SubmitError(f"--rdzv-endpoint with a password: it would be readable in {place}")
    return conf


def resolve(parsed: Parsed, environ: Mapping[str, str], *, patience: Limits, notices: list[str]) -> RendezvousOptions:
    """Resolve the options. `patience` has the limits from other options; the rendezvous configuration changes some.

    Raises NodesError, EndpointError, RendezvousConfigError or EnvironmentValueError.
    """
    least, most = parsed.converted("nnodes", node_range, NodesError)
    check_backend_name(parsed)
    standalone = is_standalone(parsed, most)
    backend = "c10d" if standalone else parsed.values.rdzv_backend
    by_value = has_shared_value(backend)
    more: tuple[Endpoint, ...] = ()
    if standalone:
        least, most = alone(parsed, least, most, notices)
        endpoint = Endpoint(host=LOOPBACK, port=0)
    elif by_value:
        report_idle_master(parsed, backend, notices)
        endpoint = Endpoint(host="", port=0)
    else:
        endpoint, *others = endpoints_of(parsed, backend, least, most, notices)
        more = tuple(others)

    job_id = run_id(parsed, standalone, most, notices)
    shared_value = None
    try:
        conf = rdzv_conf.parse_conf(parsed.values.rdzv_conf)
        if by_value:
            shared_value = shared_value_options(parsed, backend, job_id, conf, notices)
        else:
            notices.extend(rdzv_conf.unknown_key_notices(backend, conf))
        limits = rdzv_conf.limits_from_conf(backend, conf, patience)
        is_host = None if standalone or backend != "c10d" else rdzv_conf.read_is_host(conf)
        etcd = etcd_options(backend, conf, endpoint)
        succession = backend == "c10d" and most > 1 and rdzv_conf.read_succession(conf)
    except RendezvousConfigError as error:
        raise naming_source(parsed, error) from None
    if more and not succession:
        text = "a list of endpoints has no effect with --rdzv-conf succession=off; name one endpoint"
        raise parsed.error("rdzv_endpoint", EndpointError, text)
    fixed = backend == "static"
    report_open_token(conf.get("token_file"), notices)
    token = read_token(conf.get("token_file"), environ)
    if token is not None and (weak := weakness(token)):
        notices.append(weak)
    return RendezvousOptions(
        job=JobSpec(
            run_id=job_id,
            min_nodes=most if fixed else least,
            max_nodes=most,
            backend=backend,
            fixed_ranks=fixed,
            grow=Grow(parsed.values.grow),
            survive=Survive(parsed.values.survive),
            **parsed.fields("job"),
            requeues=parsed.requeues,
        ),
        limits=limits,
        endpoint=endpoint,
        standalone=standalone,
        is_host=is_host,
        token=token,
        node_rank=node_rank(parsed, standalone, fixed, most, notices),
        etcd=etcd,
        shared_value=shared_value,
        more_endpoints=more,
        succession=succession,
        agent_port=agent_port(parsed, succession, notices),
    )


def agent_port(parsed: Parsed, succession: bool, notices: list[str]) -> int:
    port: int = parsed.values.agent_port
    if not 0 <= port <= PORT_MAX:
        raise parsed.error("agent_port", EndpointError, f"a port is a number from 0 to {PORT_MAX}")
    if port and not succession:
        notices.append(
            f"{parsed.as_written('agent_port')} without effect: no other agent connects to the agents of this job"
        )
        return 0
    return port


def losses_survived(options: RunOptions) -> str:
    """The number of nodes that this job may lose, and why, in words."""
    job, others = options.job, options.more_endpoints
    if job.max_nodes == 1:
        return "the loss of no node: it has one"
    if options.is_elected:
        return f"the loss of any node, the coordinator's too: another one is elected through {job.backend}"
    if not options.succession:
        why = "with static rendezvous the others wait for it" if job.fixed_ranks else "succession is off"
        return f"the loss of any node but the coordinator's: {why}"

    # The line does not say whether another endpoint is a node's or a witness's: so the best case is shown with its
    # condition.
    alone = electorate(job.max_nodes, 0)
    best, number = alone, 0
    for witnesses in range(1, len(others) + 1):
        voters = electorate(job.max_nodes, witnesses)
        if voters.losses > best.losses:
            best, number = voters, witnesses
    if not best.losses:
        return (
            "the loss of any node but the first. If this job's first node fails, the job waits for it. "
            "A witness on a third machine prevents that (holdfast witness)"
        )
    text = f"the loss of {alone.losses or best.losses} of {job.max_nodes} nodes at one time, the coordinator's too"
    if alone.losses:
        text += f": {votes(alone)} elect another"
    if number:
        where = witnesses_at(number, list(map(str, others)))
        text += (
            f"; of {best.losses} if {where}: {votes(best)}"
            if alone.losses
            else f", if {where}: {votes(best)} elect another"
        )
    enough = job.max_nodes - best.losses >= job.min_nodes
    return text if enough else f"{text}; it trains when {job.min_nodes} are here"


def votes(voters: Electorate) -> str:
    return f"{voters.majority} of {sum(voters)} voters"


def witnesses_at(number: int, addresses: list[str]) -> str:
    """The condition that this number of the addresses are witnesses'.

    >>> witnesses_at(1, ["v:1", "w:1"]), witnesses_at(2, ["v:1", "w:1"])
    ('a witness is at v:1 or w:1', 'witnesses are at v:1 and w:1')
    """
    if number == 1:
        return f"a witness is at {' or '.join(addresses)}"
    if number == len(addresses):
        return f"witnesses are at {' and '.join(addresses)}"
    return f"{number} of {', '.join(addresses)} are witnesses"


def report_open_token(path: str | None, notices: list[str]) -> None:
    """Report a token file that everybody may read. One that cannot be read is an error where it is read."""
    try:
        if path is not None and os.stat(path).st_mode & stat.S_IROTH:
            notices.append(f"--rdzv-conf token_file={path}: every user of this machine can read it; chmod 600 it")
    except OSError:
        return


def etcd_options(backend: str, conf: rdzv_conf.Conf, endpoint: Endpoint) -> EtcdOptions | None:
    """The options of etcd; None with any other backend. Raises RendezvousConfigError or EndpointError."""
    if backend not in ("etcd", "etcd-v2"):
        return None
    from holdfast.rendezvous.etcd import read_etcd_conf

    return read_etcd_conf(backend, conf, endpoint)


def shared_value_options(
    parsed: Parsed, backend: str, job_id: str, conf: rdzv_conf.Conf, notices: list[str]
) -> SharedValueOptions:
    """Load this backend and let it check its options. Raises CallerError."""
    from holdfast.rendezvous.third_party import load_backend, read_shared_value

    try:
        loaded = load_backend(backend)
    except RendezvousConfigError as error:
        raise naming_source(parsed, error, "rdzv_backend") from error.__cause__
    options = read_shared_value(backend, loaded, parsed.values.rdzv_endpoint.strip(), job_id, conf)
    notices.extend(rdzv_conf.unknown_key_notices(backend, conf, own=loaded.conf_keys))
    return options


def node_range(text: str) -> tuple[int, int]:
    """The numbers in `N` or `MIN:MAX`. Raises ValueError.

    >>> node_range("2"), node_range("1:4")
    ((2, 2), (1, 4))
    """
    parts = text.split(":")
    if len(parts) > 2:
        raise ValueError("must be N or MIN:MAX")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ValueError("must be a number N or a range MIN:MAX") from None
    least, most = numbers[0], numbers[-1]
    if least < 1:
        raise ValueError("a job needs at least 1 node")
    if least > most:
        raise ValueError(f"the minimum {least} is above the maximum {most}")
    return least, most


def check_backend_name(parsed: Parsed) -> None:
    if parsed.values.standalone:
        return
    try:
        check_backend(parsed.values.rdzv_backend)
    except RendezvousConfigError as error:
        raise naming_source(parsed, error, "rdzv_backend") from None


def naming_source(parsed: Parsed, error: HoldfastError, dest: str = "rdzv_conf") -> HoldfastError:
    """The error, which names the variable or the file if the value came from there."""
    if parsed.by_variable(dest) or parsed.by_file(dest):
        return parsed.error(dest, type(error), str(error))
    return error


def is_standalone(parsed: Parsed, most: int) -> bool:
    """Whether --standalone is given, or implied by torchrun's rule: one node and no endpoint."""
    given = parsed.values
    implied = given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None and most == 1
    return bool(given.standalone or implied)


def alone(parsed: Parsed, least: int, most: int, notices: list[str]) -> tuple[int, int]:
    """The node range of a standalone job. Reports options that have no effect in it."""
    if least > 1:
        raise parsed.error("nnodes", NodesError, "--standalone means one node; leave one of the two options out")
    if most > 1:
        notices.append(f"{parsed.as_written('nnodes')} taken as 1: no other node can join a --standalone job")
    idle = [
        parsed.as_written(dest)
        for dest in ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
        if parsed.given(dest) and not (dest == "rdzv_backend" and parsed.values.rdzv_backend == "c10d")
    ]
    if idle:
        implied = f"a job of one node needs no rendezvous{more_nodes(parsed)}"
        reason = "--standalone" if parsed.values.standalone else implied
        notices.append(f"{', '.join(idle)} without effect: {reason}")
    return 1, 1


def endpoints_of(parsed: Parsed, backend: str, least: int, most: int, notices: list[str]) -> list[Endpoint]:
    """The coordinator's endpoint, and further ones at which a node that comes later may ask for it. Raises
    EndpointError."""
    given = parsed.values
    static = backend == "static"
    from_master = static and not given.rdzv_endpoint
    if from_master:
        endpoint = master_endpoint(parsed, most)
        report_one_node(parsed, endpoint, most, notices)
        if most > 1 and not parsed.given("master_addr"):
            notices.append(f"no --master-addr: the endpoint is {endpoint}, which only this machine can reach")
        return [endpoint]
    report_idle_master(parsed, backend, notices)
    try:
        endpoint, *more = parse_endpoints(given.rdzv_endpoint, backend, most)
    except EndpointError as error:
        raise naming_source(parsed, error, "rdzv_endpoint") from None
    report_one_node(parsed, endpoint, most, notices)
    if not given.rdzv_endpoint.strip() and most > 1:
        notices.append(f"no --rdzv-endpoint: the endpoint is {endpoint}, which only this machine can reach")
    if endpoint.port == 0 and least > 1:
        raise parsed.error("rdzv_endpoint", EndpointError, "port 0 means any free port, which other nodes cannot know")
    return [endpoint, *more]


def report_one_node(parsed: Parsed, endpoint: Endpoint, most: int, notices: list[str]) -> None:
    """Report an endpoint that other machines can reach, without a number of nodes: --nnodes was probably forgotten."""
    if most == 1 and not is_loopback(endpoint.host) and (hint := more_nodes(parsed)):
        notices.append(f"this job has one node, and no other can join it{hint}")


def more_nodes(parsed: Parsed) -> str:
    """Advice for a job of more nodes; empty: the number of nodes was given."""
    return "" if parsed.given("nnodes") else "; give --nnodes N for a job of N nodes"


def parse_endpoints(text: str, backend: str, most: int) -> list[Endpoint]:
    """Read one endpoint, or with c10d a list. Raises EndpointError."""
    texts = text.split(",")
    endpoints = [parse_endpoint(each, default_port(backend)) for each in texts] if all(texts) else []
    if len(texts) == 1:
        return endpoints or [parse_endpoint(text, default_port(backend))]
    if backend != "c10d":
        raise EndpointError(f"the endpoint {text!r} is a list, which only backend c10d has, not {backend}")
    if most == 1:
        raise EndpointError(f"the endpoint {text!r} is a list, but this job has one node; name one endpoint")
    problem = ""
    if not all(each.strip() for each in texts):
        problem = "has an empty entry"
    elif len(set(map(str, endpoints))) < len(endpoints):
        problem = "names a place twice"
    elif len(endpoints) > ENDPOINTS_MAX:
        problem = f"has {len(endpoints)} entries; at most {ENDPOINTS_MAX} are useful"
    elif any(not each.port for each in endpoints):
        problem = "has an entry with port 0, any free port, which other nodes cannot know"
    if problem:
        raise EndpointError(f"the list of endpoints {text!r} {problem}")
    return endpoints


def report_idle_master(parsed: Parsed, backend: str, notices: list[str]) -> None:
    idle = [parsed.as_written(dest) for dest in ("master_addr", "master_port") if parsed.given(dest)]
    if idle:
        given = backend == "static"
        reason = "--rdzv-endpoint is used" if given else f"only used with backend static, not {backend}"
        notices.append(f"{', '.join(idle)} without effect: {reason}")


def master_endpoint(parsed: Parsed, most: int) -> Endpoint:
    """--master-addr and --master-port, for static."""
    port = parsed.values.master_port
    if port is None:
        port = STATIC_PORT
    if not 0 <= port <= PORT_MAX:
        raise parsed.error("master_port", EndpointError, f"a port is a number from 0 to {PORT_MAX}")
    if port == 0 and most > 1:
        raise parsed.error("master_port", EndpointError, "port 0 means any free port, which other nodes cannot know")
    try:
        return parse_endpoint(f"{bracketed(parsed.values.master_addr)}:{port}", None)
    except EndpointError as error:
        raise parsed.error("master_addr", EndpointError, str(error)) from None


def bracketed(host: str) -> str:
    """The host with brackets if it is an IPv6 address, which users write with and without them."""
    host = host.strip()
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def run_id(parsed: Parsed, standalone: bool, most: int, notices: list[str]) -> str:
    """The job's id. A standalone job without one gets a unique id."""
    # The default id is one for all jobs. Nodes of a job need it to find each other; jobs of one node would share it.
    given: str = parsed.values.rdzv_id
    if given and (parsed.given("rdzv_id") or not standalone):
        return given
    fresh = str(uuid.uuid4())
    if not given:
        risk = "; the nodes will not find each other" if most > 1 else ""
        notices.append(f"{parsed.as_written('rdzv_id')} is empty, taken as {fresh}{risk}")
    return fresh


def node_rank(parsed: Parsed, standalone: bool, fixed: bool, most: int, notices: list[str]) -> int | None:
    """The group rank that this node requests; with static it is binding. Raises NodesError."""
    rank: int = parsed.values.node_rank
    if not parsed.given("node_rank"):
        return 0 if fixed else None
    if 0 <= rank < most:
        return rank
    if fixed or rank < 0:
        raise parsed.error("node_rank", NodesError, f"with {plural(most, 'node')} ranks are 0 to {most - 1}")
    reason = f"this job has one node{more_nodes(parsed)}" if standalone else f"ranks are 0 to {most - 1}"
    notices.append(f"{parsed.as_written('node_rank')} without effect: {reason}")
    return None
