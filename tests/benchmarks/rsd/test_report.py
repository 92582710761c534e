"""Tables of RSD's experiments."""

from benchmarks.rsd.report import best_shapes, plot


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


def test_a_plot_has_token_rates_where_they_were_timed():
    def part(rate):
        value = {"value": 1.5, "interval": [1, 2]}
        shape = {"cell": 4, "method": "SD", "block_efficiency": value, "tokens_per_s": rate and value}
        return {"axis": "draft length", "sampling": {"temperature": 0.3}, "shapes": [shape]}

    assert [len(plot([part(False), part(rate)]).axes) for rate in (False, True)] == [2, 3]
