"""The reference page of metrics lists them as they are, and the page "add a metric" is all that it takes."""

import re

from redraft import metrics
from redraft.metrics import ENGINE, OPENAI, SERVICE, Metrics
from tests.conftest import ROOT


def test_the_page_has_every_metric():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `redraft_")]
    expected = []
    for metric in (*ENGINE, *SERVICE, *OPENAI):
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        expected.append(f"| `{metric.series}{labels}` | {metric.kind.__name__.lower()} | {metric.help} |")
    assert rows == expected


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
