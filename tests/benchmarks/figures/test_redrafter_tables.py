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


def test_beam_widths_stand_over_the_papers():
    """Tokens/s of one request, of each, and over auto-regressive decoding; the paper's rows have the same columns."""
    methods = ["auto_regressive", *(f"width_{width}" for width in redrafter_tables.WIDTHS), "tuned"]
    cells = [
        {"method": name, "batch": batch, "tokens_per_s": 10.0 * (place + 1), "acceptance_length": 1 + place / batch}
        for batch in (2, 4)
        for place, name in enumerate(methods)
    ]
    table = redrafter_tables.table5({"zen4/beam_widths": {"cells": cells}}.__getitem__)
    two, four, lengths, *papers = table.rows
    assert (two[:3], two[-1]) == (["2", "10 (5)", "20 (10; 2.00x)"], "90 (45; 9.00x)")
    assert (four[:3], four[-1]) == (["4", "10 (2)", "20 (5; 2.00x)"], "90 (22; 9.00x)")
    assert lengths == ["tokens/step", "1.00", "1.50", "2.00", "2.50", "3.00", "3.50", "4.00", "4.50", "5.00"]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert papers[-1][5:9] == ["out of memory"] * 4
