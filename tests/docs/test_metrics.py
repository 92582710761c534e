"""The page "add a metric" is all that it takes."""

import re

from redraft import metrics
from redraft.metrics import ENGINE, Metrics
from tests.conftest import ROOT


def test_the_pages_entry_and_its_count_are_a_metric():
    page = (ROOT / "docs" / "developers" / "add-a-metric.md").read_text()
    entry, count = re.findall(r"```python\n\s*# redraft/\S+\n\s*(.*?)\n\s*```", page, re.DOTALL)
    table = dict(vars(metrics))
    exec(entry, table)
    added = table["CANCELLED"]
    values = Metrics([*ENGINE, added])
    exec(
        count.replace("self.metrics", "values").replace("metrics.CANCELLED", "added"),
        {"values": values, "added": added},
    )
    assert metrics.read(values.page().decode())["requests_cancelled_total"] == 1
