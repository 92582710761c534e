"""The papers' tables: rows of two reports meet by what was measured; a paper's number stands beside its own setting."""

from benchmarks.figures import paper_tables
from benchmarks.rsd.report import best_shapes


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
    rows = paper_tables.redrafter_table3(reports.__getitem__).rows
    assert [row[:2] for row in rows] == [[t, run] for t in ("0", "1") for run in ("1 x 1", "1 x 2", "2 x 1")]
    for row in rows:
        assert row[2] == row[4]
        assert row[2].startswith(row[1].replace(" x ", "."))
    assert [row[6] for row in rows] == ["", "", "", "2.19x", "", "1.82x"]


def test_ties_name_the_tree_that_was_best_before_rounding():
    def shape(tree):
        return {"cell": 4, "method": "SpecTr", "tree": tree, "block_efficiency": {"value": 1.37, "interval": [1, 2]}}

    part = {
        "title": "t",
        "axis": "draft length",
        "sampling": {"temperature": 0.3},
        "shapes": [shape("5x4"), shape("7x4")],
        "best": {"4": {"SpecTr": "7x4"}},
        "lead": {"4": None},
    }
    assert best_shapes([part]).rows == [["0.3", "4", "-", "1.37 (7x4)", "-", "-", "-", "-"]]
