"""tests/hosts/cable.py itself: hosts meet only over the cable, and leave nothing behind."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import cable
from tests.launch import ROOT, Rank, spawn_ranks


def talk(rank: Rank, places: tuple[cable.Host, cable.Host], go_on: Path) -> list[str]:
    """Rank 1 asks, rank 0 answers, each on its host."""
    places[rank.rank].enter()
    heard = [cable.own_namespace()]
    if rank.rank == 0:
        with socket.create_server((places[0].address, 4000)) as server:
            connection, peer = server.accept()
            with connection:
                heard.append(peer[0])
                connection.sendall(b"before")
                while not go_on.exists():
                    time.sleep(0.01)
                connection.sendall(b"after")
                time.sleep(1.5)
    else:
        with _connect(places[0].address) as connection:
            heard.append(connection.recv(100).decode())
            rank.report("heard")
            while not go_on.exists():
                time.sleep(0.01)
            connection.settimeout(1.0)
            try:
                heard.append(connection.recv(100).decode())
            except TimeoutError:
                heard.append("silence")
    return heard


def _connect(address: str) -> socket.socket:
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, 4000), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "nobody listens"
            time.sleep(0.05)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_hosts_talk_over_the_cable_only(cut: bool, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    with cable.two_hosts() as pair, spawn_ranks(talk, 2, pair.hosts, go_on) as ranks:
        assert ranks.next_report(1) == "heard"
        if cut:
            pair.cut()
        go_on.touch()
        first, second = (outcome.value for outcome in ranks.wait())
    assert len({first[0], second[0], cable.own_namespace()}) == 3
    assert first[1] == pair.hosts[1].address
    assert second[1:] == ["before", "silence" if cut else "after"]


def test_nothing_is_left_when_the_test_is_killed() -> None:
    if reason := cable.reason_to_skip():
        pytest.skip(reason)
    before = cable.namespaces()
    code = "from tests.hosts.cable import two_hosts\nwith two_hosts(): print(1); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        assert len(cable.namespaces() - before) == 2
        child.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while cable.namespaces() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert cable.namespaces() - before == set()
