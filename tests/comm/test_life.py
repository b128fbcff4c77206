"""The ends of communicators: closing, dropping, exit, fork, leaks, strangers, too little memory."""

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from pyparallel import _core
from pyparallel.comm import Aborted, Closed, Communicator, PeerLost
from tests.comm.faults import ROOT, bare_group, shared_files
from tests.comm.threads import in_threads, run_threads
from tests.launch import Rank, spawn_ranks


def pair(body, **named):
    return run_threads(2, body, **named)


def script(
    text: str, *args: str, timeout: float = 60, settings: dict[str, str] | None = None, **named
) -> subprocess.CompletedProcess:
    """Runs Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(settings or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        **named,
    )


# --- closing


def test_close_twice_and_use_after_close():
    def body(comm: Communicator) -> None:
        comm.barrier()
        comm.close()
        comm.close()
        for call in (
            lambda: comm.all_reduce(torch.ones(3)),
            lambda: comm.all_reduce(torch.ones(3), async_op=True),
            lambda: comm.barrier(),
            lambda: comm.send(torch.ones(3), 1 - comm.rank),
            lambda: comm.irecv(torch.ones(3)),
            lambda: comm.split(0),
            lambda: comm.all_reduce("not a tensor"),
        ):
            with pytest.raises(Closed, match="group threads: the communicator is closed"):
                call()
        assert "closed" in comm.failure
        assert "closed" in repr(comm)
        comm.abort("of no use")

    pair(body)


def test_a_peer_that_closed_is_lost():
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.close()
            return
        start = time.monotonic()
        with pytest.raises(PeerLost, match=r"all_reduce #1, .* rank 0 .*closed its communicator"):
            comm.all_reduce(torch.ones(3))
        assert time.monotonic() - start < 5
        with pytest.raises((PeerLost, Aborted), match="rank 0"):  # and so later calls
            comm.barrier()

    pair(body)


def test_abort_wakes_every_waiter():
    def body(comm: Communicator) -> str:
        if comm.rank == 2:
            time.sleep(0.3)
            comm.abort("the user wants to stop")
        start = time.monotonic()
        with pytest.raises(Aborted) as caught:
            comm.all_reduce(torch.ones(3))
        assert time.monotonic() - start < 5
        with pytest.raises(Aborted):
            comm.recv(torch.ones(3), 1)
        return str(caught.value)

    for text in run_threads(3, body):
        assert "aborted by rank 2: the user wants to stop" in text


def test_closing_ends_what_was_started():
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(3), async_op=True)
            receive = comm.irecv(torch.ones(3), 1)
            comm.close()
            assert isinstance(work.exception(), Closed)
            assert isinstance(receive.exception(), Closed)
        else:
            time.sleep(0.5)

    pair(body)


def dropped(rank: Rank) -> str:
    """One rank lets its communicator go in the middle; the other is told, nobody hangs."""
    comm = Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=20)
    comm.barrier()
    if rank.rank == 1:
        start = time.monotonic()
        del comm
        gc.collect()
        assert time.monotonic() - start < 1
        return "gone"
    with pytest.raises(PeerLost, match="rank 1"):
        comm.all_reduce(torch.ones(3))
    return "told"


def test_dropping_on_one_rank_only():
    with spawn_ranks(dropped, 2, timeout=40) as ranks:
        assert [outcome.value for outcome in ranks.wait()] == ["told", "gone"]


def test_closing_with_a_stopped_peer_does_not_wait():
    with bare_group(2, "barrier", started=[1]) as group:
        comm = Communicator(
            _core.Communicator.join(bytes.fromhex(group.id), 0, 2, "faults", 30_000)
        )
        comm.barrier()
        group.signal(1, signal.SIGSTOP)
        start = time.monotonic()
        comm.close()
        assert time.monotonic() - start < 0.5


# --- the end of a process

EXIT = """
    import sys, torch
    from pyparallel.comm import Communicator
    comm = Communicator.from_file(sys.argv[1], 0, 1)
    other = Communicator.from_id(Communicator.unique_id(), 0, 1)
    x = torch.ones(10, 10)
    works = [comm.all_reduce(x.t(), async_op=True) for _ in range(50)]
    print("at the end", flush=True)
"""


def test_exit_with_live_communicators_and_started_calls(tmp_path):
    done = script(EXIT, str(tmp_path / "meet"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "at the end\n", "")


def test_exit_while_a_started_call_waits_for_a_peer_that_never_calls(tmp_path):
    """The interpreter goes while its worker sleeps inside the core."""
    body = """
        import sys, torch
        from pyparallel.comm import Communicator
        comm = Communicator.from_file(sys.argv[1], int(sys.argv[2]), 2)
        comm.barrier()
        if comm.rank == 0:
            works = [comm.all_reduce(torch.ones(4, 4).t(), async_op=True) for _ in range(3)]
            receive = comm.irecv(torch.ones(4), 1)
        else:
            sys.stdin.read()  # alive, and silent, until the other has gone
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body), str(tmp_path / "meet"), "1"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as peer:
        start = time.monotonic()
        done = script(body, str(tmp_path / "meet"), "0")
        assert (done.returncode, done.stderr) == (0, "")
        assert time.monotonic() - start < 40
        peer.communicate(b"")
        assert peer.returncode == 0


def test_a_forked_child_is_refused_and_does_no_harm():
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    comm.all_reduce(torch.ones(3))
                    os._exit(1)
                except Closed as error:
                    ok = re.search("fork", str(error)) is not None
                    comm.close()
                    comm.abort("from the child")
                    os._exit(0 if ok else 2)
            assert os.waitpid(child, 0)[1] == 0
        assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3

    pair(body)


# --- memory and strangers


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs and changes the user: needs root")
class TestAsRoot:
    def test_too_little_shared_memory_says_needed_and_free(self, tmp_path):
        small = tmp_path / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("mounting a tmpfs is not allowed here")
        try:
            with bare_group(
                2, "all_reduce", 3_000_000, env={"PYPARALLEL_SHM_DIR": str(small)}
            ) as group:
                for rank in range(2):
                    end = group.end(rank)
                    assert end.error == "NoMemory", end
                    numbers = [int(n) for n in re.findall(r"(\d+) bytes", end.text)]
                    assert max(numbers) > 65536, end.text  # needed
                    assert re.search(r"\d+ (bytes )?(are |is )?free|free", end.text), end.text
            assert list(small.iterdir()) == []
        finally:
            subprocess.run(["umount", str(small)], check=True)

    def test_a_process_of_another_user_gets_nothing(self):
        """It has the very id, but the kernel says who it is; the group then meets all the same."""
        body = """
            import os, sys
            from pyparallel import _core
            os.setgid(65534); os.setuid(65534)
            try:
                _core.Communicator.join(bytes.fromhex(sys.argv[1]), 1, 2, "stranger", 2500)
            except Exception as error:
                print(type(error).__name__, error)
            else:
                print("joined")
        """
        with bare_group(2, "all_reduce", started=[0]) as group:
            time.sleep(0.5)
            stranger = script(body, group.id)
            assert "joined" not in stranger.stdout
            assert "user" in stranger.stdout, (stranger.stdout, stranger.stderr)
            own = _core.Communicator.join(bytes.fromhex(group.id), 1, 2, "own", 20_000)
            own.barrier(20_000, False)
            own.close()


@pytest.mark.parametrize("setting", ["PYPARALLEL_SIMD=mmx", "PYPARALLEL_SPIN_US=often"])
def test_a_nonsense_setting_is_refused_before_joining(setting):
    """A rank that joined first and then raised alone would leave the others waiting for it."""
    done = script(
        """
        from pyparallel.comm import Communicator, InvalidArgument
        try:
            Communicator.from_id(Communicator.unique_id(), 1, 2, timeout=0.5)
        except InvalidArgument as error:
            print(error)
        """,
        settings=dict([setting.split("=")]),
    )
    assert setting in done.stdout, done


def test_another_id_gets_nothing():
    with bare_group(2, "all_reduce", started=[0]):
        time.sleep(0.3)
        with pytest.raises(TimeoutError, match="rank 0 absent"):
            _core.Communicator.join(_core.Communicator.random_id(), 1, 2, "other", 500)


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_group_of_an_id_shares_nothing_with_the_first(world):
    id = Communicator.unique_id()

    def rank(number: int) -> None:
        with Communicator.from_id(id, number, world, timeout=10) as first:
            first.all_reduce(torch.ones(4))
            first.send(torch.full((4,), 5.0), number, tag=1)
            first.barrier()
            with Communicator.from_id(id, number, world, timeout=10) as second:
                time.sleep(0.1 * number)
                x = torch.full((4,), 10.0 * (number + 1))
                second.all_reduce(x)
                assert x.tolist() == [sum(10.0 * (r + 1) for r in range(world))] * 4
                out = torch.zeros(4)
                second.send(torch.full((4,), 7.0), number, tag=1)
                assert second.recv(out, number, tag=1) == number
                assert out.tolist() == [7.0] * 4
                second.barrier()

    in_threads([lambda number=number: rank(number) for number in range(world)])


def test_no_name_in_the_file_system_while_in_use(tmp_path):
    """The memory has no path: nobody can open it by name, and no crash can leave it behind."""

    def body(comm: Communicator) -> list[str]:
        comm.all_reduce(torch.ones(1_000_000))
        links = []
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                links.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115
            except OSError:
                continue
        return links

    for links in pair(body):
        ours = [link for link in links if "pyparallel" in link]
        assert all("memfd:" in link or "(deleted)" in link for link in ours), ours
    assert not [name for name in shared_files() if "pyparallel" in name]


def test_ctrl_c_during_a_collective_in_python(tmp_path):
    body = """
        import sys, torch
        from pyparallel.comm import Communicator
        comm = Communicator.from_file(sys.argv[1], int(sys.argv[2]), 2)
        comm.barrier()
        if comm.rank == 1:
            sys.stdin.read()
            sys.exit(0)
        print("waiting", flush=True)
        try:
            comm.all_reduce(torch.ones(4))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(body), str(tmp_path / "meet")]
    named = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stdin": subprocess.PIPE}
    with (
        subprocess.Popen([*command, "1"], **named) as peer,
        subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, **named) as waiter,
    ):
        assert waiter.stdout.readline() == b"waiting\n"
        time.sleep(0.4)
        start = time.monotonic()
        waiter.send_signal(signal.SIGINT)
        assert waiter.stdout.readline() == b"interrupted\n"
        assert time.monotonic() - start < 5
        waiter.communicate(b"")
        peer.communicate(b"")
        assert Path(tmp_path / "meet").exists() is False
