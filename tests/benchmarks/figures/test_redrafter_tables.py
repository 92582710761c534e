"""ReDrafter's tables: rows of two reports meet by what was measured; a paper's number stands beside its own setting."""

from benchmarks.figures import redrafter_tables


def ranks_report(*order):
    """Runs of (ranks, threads) in an order; the speed-up names them."""

    def entry(value):
        return {"speedup": value, "acceptance_length": 2.0}

    return [
        {
            "ranks": ranks,
            "threads": threads,
            "decoding": {
                t: {"contenders": {"redrafter": entry(ranks + threads / 10), "best": entry(10 * ranks + threads / 10)}}
                for t in ("0", "1")
            },
        }
        for ranks, threads in order
    ]


def test_reports_in_different_orders_meet_by_their_ranks():
    reports = {
        "tensor_parallel": ranks_report((1, 1), (1, 2), (2, 1)),
        "icelake/tensor_parallel": ranks_report((2, 1), (1, 1), (1, 2)),
    }
    rows = redrafter_tables.table3(reports.__getitem__).rows
    assert [row[:2] for row in rows] == [[t, run] for t in ("0", "1") for run in ("1 x 1", "1 x 2", "2 x 1")]
    for row in rows:
        assert row[2] == row[4]
        assert row[2].startswith(row[1].replace(" x ", "."))
    assert [row[6] for row in rows] == ["", "", "", "2.19x", "", "1.82x"]


def test_widths_that_were_not_timed_have_a_dash_and_their_tokens_per_step():
    """Tokens/s of one request, of each, and over auto-regressive decoding; the paper's rows have the same columns."""
    rates = {"auto_regressive": 10.0, "tuned": 30.0} | {f"width_{width}": 20.0 for width in (1, 2, 4, 8, 16)}
    cells = [{"method": name, "batch": 2, "tokens_per_s": rate} for name, rate in rates.items()]
    replayed = [
        {"width": width, "length": length, "acceptance_length": length + width / 100}
        for width in redrafter_tables.WIDTHS
        for length in (4, 5)
    ]
    reports = {"beam_widths": {"cells": cells}, "beam_shapes": {"drafters": {"d": replayed}}}
    table = redrafter_tables.table5(reports.__getitem__)
    ours, lengths, *papers = table.rows
    assert ours == ["2", "10 (5)", *["20 (10; 2.00x)"] * 5, "-", "-", "30 (15; 3.00x)"]
    assert lengths[2:9] == ["5.01", "5.02", "5.04", "5.08", "5.16", "5.32", "5.64"]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert papers[-1][5:9] == ["out of memory"] * 4
