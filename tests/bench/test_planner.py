"""The validation page: its bounds hold, it is the one in docs, and a wrong formula breaks it.

Layers of proof: pure numbers against published tables; all of it runs in CI.
"""

from __future__ import annotations

import pytest

from bench import cli
from bench.planner import afterwards, page, quantities, rankings, times
from bench.planner.tables import FOLDER, Compared, Group, rows, source
from pyparallel.planner import activations, kernels
from pyparallel.planner.memory import memory_report


@pytest.fixture(scope="module")
def made():
    return quantities.groups()


@pytest.fixture(scope="module")
def timed():
    return times.groups()


@pytest.fixture(scope="module")
def orders(timed):
    return rankings.orders(timed)


def test_every_error_is_within_its_bound(made, timed, orders):
    assert page.problems(made + timed, orders) == []


def test_bounds_are_those_that_were_set(made, timed):
    bounds = {group.title: (group.mean, group.worst) for group in made + timed}
    assert bounds["Parameters"][1] == 0.5
    assert bounds["ZeRO: bytes of states per device"][1] == 2.5
    assert bounds["Activations and states, closed forms"][1] == 0.1
    assert bounds["MFU from a published time"][1] == 0.6
    assert bounds["Measured memory, 8 x B200"] == (3.0, 8.0)
    assert bounds["Measured memory, torchtitan"] == (5.0, 8.0)
    assert all(bounds[g.title][1] == 20.0 for g in timed)
    assert all(bounds[g.title][0] in (10.0, None) for g in timed)


def test_all_step_times_together(timed):
    errors = [abs(row.error) for group in timed for row in group.counted]
    assert len(errors) > 70
    assert sum(errors) / len(errors) < 10
    assert max(errors) < 20


@pytest.fixture(scope="module")
def plain():
    return page._without_fitted()


def test_without_the_fitted_factor_they_stay_near(plain, timed):
    assert kernels.running(8) == pytest.approx(1.05, abs=1e-3)
    errors = [abs(row.error) for group in plain for row in group.counted]
    assert sum(errors) / len(errors) < 10
    changed = [p.bias != t.bias for p, t in zip(plain, timed, strict=True)]
    assert all(changed)


def test_the_page_in_docs_is_the_one_that_is_made(made, timed, orders, plain):
    """`python -m bench planner` writes it: run it after a change of the planner."""
    text = "\n".join(page.page(made, timed, orders, plain)) + "\n"
    assert page.PAGE.read_text() == text


def test_the_command_writes_it(tmp_path, monkeypatch, capsys, made, timed):
    written = tmp_path / "validation.md"
    monkeypatch.setattr(page, "PAGE", written)
    copy = tmp_path / "choosing.md"
    copy.write_text("a\n\n    $ pyparallel plan --model llama-3-8b --gpus 8 --top 1\n"
                    "    1 x h100 (1 GiB), nodes of 9: NVLink 4 1 GB/s inside, InfiniBand NDR 1 "
                    "GB/s between\n\nb\n")  # fmt: skip
    monkeypatch.setattr(page.guide, "GUIDE", copy)
    monkeypatch.setattr(page.quantities, "groups", lambda: made)
    monkeypatch.setattr(page.times, "groups", lambda: timed)
    assert cli.main(["planner"]) == 0
    assert "| Parameters | 8 of 10 |" in written.read_text()
    assert "Measured memory, 8 x B200" in capsys.readouterr().out
    assert "    8 x h100 (79.6 GiB), nodes of 8: NVLink 4 450 GB/s inside" in copy.read_text()
    copy.write_text("    $ pyparallel plan --model llama-3-8b --gpus 8\n    no such line\n")
    with pytest.raises(ValueError, match="no line like 'no such line'"):
        page.guide.refreshed(copy.read_text())


def test_a_wrong_formula_breaks_a_bound(monkeypatch):
    kept = activations.kept_bytes
    monkeypatch.setattr(
        activations, "kept_bytes", lambda job, layout, layer: 1.002 * kept(job, layout, layer)
    )
    assert quantities.korthikanti_memory().problems()


def test_slower_kernels_break_a_bound(monkeypatch):
    monkeypatch.setattr(kernels, "JITTER", 0.15)
    assert times.korthikanti().problems()


def test_every_row_of_a_table_that_can_be_predicted_is_there(made, timed):
    counts = {group.table: len(group.rows) for group in made + timed}
    assert counts["simumax_b200"] == len(rows("simumax_b200")) == 22
    assert counts["korthikanti_end_to_end"] == 2 * len(rows("korthikanti_end_to_end"))
    assert counts["ptdp_table1"] == len(rows("ptdp_table1"))
    assert counts["ptdp_table2_zero3"] == len(rows("ptdp_table2_zero3"))
    assert counts["zero_memory"] == 3 * len(rows("zero_memory"))
    assert counts["llama3_405b_4d"] == len(rows("llama3_405b_4d"))


def test_what_was_looked_at_afterwards_is_told_apart(made, timed, orders, plain):
    """NeMo's runs are held to the bounds; those of an unfused framework are shown, and counted
    nowhere."""
    nemo, loose = timed[-1], afterwards.unfused()
    assert (nemo.table, len(nemo.counted)) == ("nemo_24_12_h100", len(rows("nemo_24_12_h100")))
    assert (loose.worst, loose.mean) == (None, None)
    assert len(loose.rows) == len(rows("mpt_fsdp_a100")) + len(rows("torchtitan_a100"))
    assert -25 < loose.bias < 0
    mixtures = afterwards.mixtures()
    assert (mixtures.worst, len(mixtures.rows)) == (None, len(rows("moe_megatron_bridge")))
    text = "\n".join(page.page(made, timed, orders, plain))
    assert text.count(loose.title) == text.count(mixtures.title) == 1


def test_mixtures_that_the_host_does_not_slow_are_near():
    """Qwen3-30B on 8 B200 with micro batches of 4 and CUDA graphs."""
    graphs = [row.error for row in afterwards.mixtures().rows if row.label.startswith("26.04")]
    assert len(graphs) == 2
    assert max(map(abs, graphs)) < 15


def test_published_runs_fit_in_their_devices():
    """They ran, so a plan that calls them too large would be wrong."""
    jobs = [*times.korthikanti_jobs(), *times.megatron_jobs()]
    assert len(jobs) == 16
    full = [
        (label, report.peak / report.capacity)
        for label, job, cluster, layout in jobs
        if not (report := memory_report(job, cluster, layout)).fits
    ]
    assert full == []


def test_every_table_names_its_source():
    tables = sorted(FOLDER.glob("*.csv"))
    assert len(tables) == 21
    assert all(source(table.stem) for table in tables)


def test_errors_are_signed_and_bounds_bite():
    low = Compared("a", 100.0, 90.0, "s")
    left_out = Compared("b", 100.0, 10.0, "s", counted=False)
    points = Compared("c", 50.0, 50.5, "%", points=True)
    assert (low.error, points.error) == (pytest.approx(-10), 0.5)
    assert Group("g", "t", (low, left_out), worst=10.5).problems() == []
    assert Group("g", "t", (low,), worst=9.0, mean=9.0).problems() == [
        "g: worst 10.00, bound 9",
        "g: mean 10.00, bound 9",
    ]
