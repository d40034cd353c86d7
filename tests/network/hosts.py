"""Pretend hosts on this machine, for tests: each has its own network, host name, process ids, mounts and IPC.

    with PretendHosts(3, folder) as hosts:
        program = hosts[1].start(["sleep", "60"])     # hosts are numbered from 1: node1, node2 …
        hosts.unplug(1)

They share the disk and the clocks, and are joined by a bridge in a namespace of its own. No namespace has a name and
nothing is changed outside of them: when the last process and descriptor is gone, so is everything, however the test
ended, and two test runs cannot meet. Needs root, iproute2, nftables and util-linux.

Knows nothing of jobs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from holdfast.linux import process_stat
from tests.support.limits import limit_s as scaled

PREFIX_V4, PREFIX_V6 = "10.77.0.", "fd00:77::"
TOOLS = ("ip", "tc", "ss", "nft", "nsenter", "unshare", "setpriv", "env")
END_S_MAX = 10.0

_BOOT = """
hostname "$1" && mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind "$2" /etc/hosts || exit 1
exec 9</sys/fs/cgroup && mount -t sysfs sysfs /sys && mount --rbind /proc/self/fd/9 /sys/fs/cgroup && exec 9<&- || exit 1
[ ! -e /etc/resolv.conf ] || mount --bind "$3" /etc/resolv.conf || exit 1
for file in .bashrc .profile .bash_profile .bash_login; do
    [ ! -e "$4/$file" ] || mount --bind /dev/null "$4/$file" || exit 1
done
echo up
exec >/dev/null 2>&1
while :; do sleep 3600; done
"""
"""PID 1 of a host. The shell reaps whatever falls to it. A login shell reads no file of the user's: what such a file
does when it is killed in the middle, with a lock for example, would stay behind on the machine. Its /sys is of its own
network, and of this machine's control groups."""


@cache
def why_not() -> str:
    """Why this machine cannot have pretend hosts; empty when it can."""
    if os.geteuid() != 0:
        return "pretend hosts need root"
    missing = [tool for tool in TOOLS if not _finds(tool)]
    if missing:
        return f"pretend hosts need {', '.join(missing)} (Debian: iproute2, nftables, util-linux)"
    trial = "ip link add br0 type bridge && ip link add eth0 type veth peer name eth1 && nft add table inet t"
    trial += " && mount -t sysfs sysfs /sys"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--ipc", "--mount", "--fork", "--mount-proc", "sh", "-c", trial],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return f"this machine makes no namespaces: {done.stderr.strip()}" if done.returncode else ""


def _finds(tool: str) -> bool:
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin"]
    return any(os.access(os.path.join(folder, tool), os.X_OK) for folder in folders)


class Program:
    """A process on a host."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes]) -> None:
        self.host = host
        self._process = process

    @property
    def pid(self) -> int:
        """As this machine counts. The process that was started into the host has this one as its only child."""
        return _only_child(self._process.pid)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, limit_s: float) -> int:
        """Its exit code as a shell shows it. Raises subprocess.TimeoutExpired."""
        code = self._process.wait(limit_s)
        return 128 - code if code < 0 else code

    def end(self) -> None:
        """Kill it, if it still runs."""
        if self.running:
            self._process.kill()  # the program carries a parent-death signal
        self._process.wait(scaled(END_S_MAX))

    def resume(self) -> None:
        """nsenter stops itself when its child is stopped."""
        if self.running:
            self._process.send_signal(signal.SIGCONT)


class Host:
    """One machine: a network that stays (its cable), and processes that come and go."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.name = f"node{number}"
        self.v4, self.v6 = f"{PREFIX_V4}{number}", f"{PREFIX_V6}{number}"
        self.hosts_file = folder / f"{self.name}.hosts"
        """Its /etc/hosts. To be written in place: it is a bind mount."""
        self._resolv_file = folder / f"{self.name}.resolv"
        self._resolv_file.write_text("nameserver 127.0.0.1\noptions attempts:1 timeout:1\n")
        self.network = -1
        self._programs: list[Program] = []
        self._machine: subprocess.Popen[bytes] | None = None
        self._init = 0

    @property
    def shared_memory(self) -> Path:
        """Its /dev/shm, from outside."""
        return Path("/proc", str(self._init), "root", "dev", "shm")

    def boot(self) -> None:
        """Start its process tree: PID 1, which does nothing."""
        namespaces = ("--uts", "--pid", "--ipc", "--mount", "--fork", "--kill-child=SIGKILL", "--mount-proc")
        home = pwd.getpwuid(os.getuid()).pw_dir
        script = ("sh", "-c", _BOOT, "init", self.name, str(self.hosts_file), str(self._resolv_file), home)
        self._machine = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *_in_network(self.network), "unshare", *namespaces, *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self.network,),
            env=_bare_environment(),
            start_new_session=True,
        )
        assert self._machine.stdout is not None
        with self._machine.stdout as said:
            line = said.readline()
            assert line == b"up\n", f"{self.name} did not boot: {line!r}"
        self._init = _only_child(self._machine.pid)

    def start(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
    ) -> Program:
        """Start a program on this host, both its streams to `stdout`."""
        process = subprocess.Popen(
            [
                *("nsenter", "--target", str(self._init), "--all", "--"),
                *("setpriv", "--pdeathsig", "KILL", "env", "-C", str(cwd or "/"), *map(str, command)),
            ],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout,
            start_new_session=True,
        )
        program = Program(self, process)
        self._programs.append(program)
        return program

    def run(self, command: Sequence[str | Path], limit_s: float = 20.0) -> str:
        """Run a command on this host and return what it printed. Raises CalledProcessError, TimeoutExpired."""
        enter = ["nsenter", "--target", str(self._init), "--all", "--"]
        return subprocess.run(
            [*enter, *map(str, command)], check=True, timeout=scaled(limit_s), stdout=subprocess.PIPE, text=True
        ).stdout

    def pids(self) -> list[int]:
        """All its processes but PID 1, as this machine counts them."""
        mine = os.readlink(f"/proc/{self._init}/ns/pid")
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if pid != self._init and os.readlink(f"/proc/{pid}/ns/pid") == mine:
                    found.append(pid)
        return found

    def entered(self) -> list[int]:
        """Its processes that have come from outside: their parents are on this machine, and not on the host."""
        own = self.pids()
        stats = {pid: process_stat(pid) for pid in own}
        return [pid for pid, stat in stats.items() if stat is not None and stat.parent not in (self._init, *own)]

    def kill(self) -> None:
        """Every process dies at once; the kernel stays and answers for them (FIN, RST)."""
        if self._machine is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._machine.wait(scaled(END_S_MAX))
        self._machine = None
        for program in self._programs:
            program.end()
        self._programs.clear()

    def freeze(self) -> None:
        """SIGSTOP to every process, and to those that they made meanwhile. The kernel still acknowledges packets."""
        stopped: set[int] = set()
        while fresh := set(self.pids()) - stopped:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh

    def thaw(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for program in self._programs:
            program.resume()


class PretendHosts:
    """`count` hosts on one bridge. A context: all of it is gone at the end."""

    def __init__(self, count: int, folder: Path) -> None:
        """`folder` holds their /etc/hosts."""
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts = {number: Host(number, folder) for number in range(1, count + 1)}
        self._switch = -1

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __enter__(self) -> PretendHosts:
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._tear_down()

    # ---------------------------------------------------------------- faults

    def unplug(self, number: int) -> None:
        """Pull the cable: silence, in both directions."""
        self._link(number, "down")

    def plug(self, number: int) -> None:
        self._link(number, "up")

    def crash(self, number: int) -> None:
        """Power loss: its processes are gone, and nobody hears of it."""
        self.unplug(number)
        self[number].kill()

    def partition(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Nothing goes between the two groups any more."""
        self._between(some, others, "drop")

    def one_way(self, some: Iterable[int], others: Iterable[int]) -> None:
        """What the first group sends does not arrive at the other any more."""
        senders = list(some)
        for number in others:
            self._rules(self[number], [f"in {family} saddr {address} drop" for family, address in self._of(senders)])

    def reject(self, some: Iterable[int], others: Iterable[int]) -> None:
        """As a firewall does it: every TCP connection between the two groups is reset, at both ends, now and later."""
        groups = (list(some), list(others))
        self._between(*groups, "tcp flags & rst == 0 reject with tcp reset")
        for mine, theirs in (groups, groups[::-1]):
            for number in mine:
                for _, address in self._of(theirs):
                    _run_in(self[number].network, ["ss", "--tcp", "--kill", "dst", f"[{address}]"], "")

    def blackhole(self, number: int, port: int) -> None:
        """The host drops what comes to this TCP port."""
        self._rules(self[number], [f"in tcp dport {port} drop"])

    def lose(self, number: int, percent: float) -> None:
        """The host loses this share of the packets that come in."""
        self._rules(self[number], [f"in numgen random mod 1000 < {round(percent * 10)} drop"])

    def heal(self) -> None:
        """All cables are in, no packet is dropped any more."""
        for host in self:
            self.plug(host.number)
            _run_in(host.network, ["nft", "-f", "-"], "add table inet fault\ndelete table inet fault\n")

    def second_network(self) -> None:
        """Every host gets an eth1 too, 10.78.0.<number>, on a bridge of its own."""
        _ip(self._switch, "link add br1 type bridge mcast_snooping 0", "link set br1 up")
        for host in self:
            peer = f"link add w{host.number} type veth peer name eth1 netns {host._init}"
            _ip(self._switch, peer, f"link set w{host.number} master br1 up")
            _ip(host.network, f"addr add 10.78.0.{host.number}/16 dev eth1", "link set eth1 up")

    def slow(self, rate: str, device: str = "eth0") -> None:
        """What the hosts send over this device goes no faster, such as 10mbit."""
        for host in self:
            shape = ("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate)
            _run_in(host.network, [*shape, "burst", "64kb", "latency", "200ms"], "")

    def slow_node(self, number: int, rate: str) -> None:
        """What this host sends goes no faster."""
        shape = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate)
        _run_in(self[number].network, [*shape, "burst", "64kb", "latency", "200ms"], "")

    def slow_link(self, number: int, to: int, rate: str) -> None:
        """What this host sends to that one goes no faster."""
        lines = (
            "qdisc replace dev eth0 root handle 1: htb default 1",
            "class add dev eth0 parent 1: classid 1:1 htb rate 10gbit",
            f"class add dev eth0 parent 1: classid 1:3 htb rate {rate}",
            f"filter add dev eth0 parent 1:0 protocol ip prio 1 u32 match ip dst {self[to].v4}/32 flowid 1:3",
        )
        for line in lines:
            _run_in(self[number].network, ["tc", *line.split()], "")

    def on_switch(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start a program in the network of the bridge `br0`, where the cable of each host is the device `v<number>`."""
        return subprocess.Popen(
            [*_in_network(self._switch), "setpriv", "--pdeathsig", "KILL", *map(str, command)],
            stdin=subprocess.DEVNULL,
            pass_fds=(self._switch,),
            env=_bare_environment(),
        )

    # ---------------------------------------------------------------- how

    def _build(self) -> None:
        with _new_network() as (switch, _):
            self._switch = os.dup(switch)
        _ip(self._switch, "link set lo up", "link add br0 type bridge mcast_snooping 0", "link set br0 up")
        for host in self:
            with _new_network() as (network, pid):
                host.network = os.dup(network)
                _ip(
                    self._switch,
                    f"link add v{host.number} type veth peer name eth0 netns {pid}",
                    f"link set v{host.number} master br0 up",
                )
            _ip(
                host.network,
                "link set lo up",
                f"addr add {host.v4}/16 dev eth0",
                f"addr add {host.v6}/64 dev eth0 nodad",
                "link set eth0 up",
            )
            host.hosts_file.write_text(self.phone_book())
            host.boot()

    def phone_book(self) -> str:
        """The usual /etc/hosts."""
        return "127.0.0.1 localhost\n" + "".join(f"{host.v4} {host.name}\n" for host in self)

    def _tear_down(self) -> None:
        for host in self:
            host.kill()
            if host.network >= 0:
                os.close(host.network)
                host.network = -1
        if self._switch >= 0:
            os.close(self._switch)
            self._switch = -1

    def _link(self, number: int, state: str) -> None:
        _ip(self._switch, f"link set v{number} {state}")

    def _between(self, some: Iterable[int], others: Iterable[int], verdict: str) -> None:
        groups = (list(some), list(others))
        for mine, theirs in (groups, groups[::-1]):
            for number in mine:
                rules = [f"in {family} saddr {address} {verdict}" for family, address in self._of(theirs)]
                if verdict == "drop":
                    rules += [f"out {family} daddr {address} drop" for family, address in self._of(theirs)]
                self._rules(self[number], rules)

    def _of(self, numbers: Iterable[int]) -> list[tuple[str, str]]:
        """Families, as nft calls them, and addresses."""
        return [each for number in numbers for each in (("ip", self[number].v4), ("ip6", self[number].v6))]

    def _rules(self, host: Host, rules: Iterable[str]) -> None:
        table = "table inet fault {\n" + "".join(
            f"chain {chain} {{ type filter hook {hook} priority -10; }}\n"
            for chain, hook in (("in", "input"), ("out", "output"))
        )
        added = "".join(f"add rule inet fault {rule}\n" for rule in rules)
        _run_in(host.network, ["nft", "-f", "-"], f"{table}}}\n{added}")


@contextlib.contextmanager
def _new_network() -> Iterator[tuple[int, int]]:
    """A descriptor of a fresh network namespace, and the pid of a process in it, for as long as the context lasts."""
    maker = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo up; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_bare_environment(),
    )
    assert maker.stdin is not None
    assert maker.stdout is not None
    with maker, maker.stdin, maker.stdout:
        assert maker.stdout.readline() == b"up\n"
        network = os.open(f"/proc/{maker.pid}/ns/net", os.O_RDONLY)
        try:
            yield network, maker.pid
        finally:
            os.close(network)


def _in_network(network: int) -> list[str]:
    return ["nsenter", f"--net=/proc/self/fd/{network}", "--"]


def _run_in(network: int, command: Sequence[str], text: str) -> None:
    done = subprocess.run(
        [*_in_network(network), *command],
        input=text,
        pass_fds=(network,),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}\n{text}")


def _ip(network: int, *lines: str) -> None:
    _run_in(network, ["ip", "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _only_child(pid: int) -> int:
    end = time.monotonic() + scaled(END_S_MAX)
    while time.monotonic() < end:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.002)
    raise RuntimeError(f"process {pid} has no child")


def _bare_environment() -> dict[str, str]:
    """Without what marks the processes of one test."""
    return {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
