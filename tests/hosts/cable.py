"""Hosts in miniature: network namespaces joined by a virtual cable, for ranks of one machine.

    with two_hosts() as hosts:
        with spawn_ranks(fn, 4, hosts.address, ...) as ranks:    # fn calls hosts.enter(...) first
            hosts.cut()                                          # the cable is down now

A namespace has no name and no file: it lives as long as a process is in it, and the process that
keeps it ends with the pipe from the test. So nothing is left, even when the test is killed.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

INTERFACE = "cable"  # of each host: GLOO_SOCKET_IFNAME
CLONE_NEWNET = 0x40000000


def reason_to_skip() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=30)
    return f"cannot make network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


class Keeper:
    """A process in a network namespace of its own, until its input ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.pid = self._process.pid

    def run(self, *command: str) -> None:
        _run("nsenter", "--target", str(self.pid), "--net", *command)

    def end_all(self) -> None:
        """Kills every other process of the host, whoever started it."""
        own = _namespace_of(self.pid)
        for process in _processes():
            if process != self.pid and _namespace_of(process) == own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Host:
    """What a rank's process needs to know: picklable."""

    keeper: int  # process id
    address: str

    def enter(self) -> None:
        """Puts this process on the host. To be called in its main thread, before it has others
        that use the network."""
        namespace = os.open(f"/proc/{self.keeper}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class TwoHosts:
    def __init__(self, keepers: tuple[Keeper, Keeper]) -> None:
        self._keepers = keepers
        first, second = keepers
        _run(
            *f"ip link add {INTERFACE} netns {first.pid} type veth".split(),
            *f"peer name {INTERFACE} netns {second.pid}".split(),
        )
        self.hosts = tuple(Host(k.pid, f"10.77.0.{i + 1}") for i, k in enumerate(keepers))
        for keeper, host in zip(keepers, self.hosts, strict=True):
            keeper.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            keeper.run("ip", "link", "set", "lo", "up")
        self.mend()

    def cut(self) -> None:
        """From now on nothing passes between the hosts, and nobody is told."""
        self._keepers[1].run("ip", "link", "set", INTERFACE, "down")

    def end(self, number: int) -> None:
        """A host goes down: its cable first, then all that runs on it."""
        self._keepers[number].run("ip", "link", "set", INTERFACE, "down")
        self._keepers[number].end_all()

    def mend(self) -> None:
        for keeper in self._keepers:
            keeper.run("ip", "link", "set", INTERFACE, "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts at 10.77.0.1 and 10.77.0.2. Skips the test where that is impossible."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        keepers = []
        for _ in range(2):
            keeper = Keeper()
            stack.callback(keeper.close)
            stack.callback(keeper.end_all)
            keepers.append(keeper)
        yield TwoHosts((keepers[0], keepers[1]))


def own_namespace() -> str:
    return _namespace_of(os.getpid())


def namespaces() -> set[str]:
    """The network namespaces that some process is in."""
    return {_namespace_of(process) for process in _processes()} - {""}


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _namespace_of(process: int) -> str:
    """Empty where the process has ended."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{process}/ns/net").readlink())
    return ""
