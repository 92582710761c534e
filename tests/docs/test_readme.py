"""README's figures are those of docs/results, and its links lead somewhere."""

import re
from pathlib import Path

from benchmarks.load.comparison import AR
from studies.figures.contenders import contenders
from studies.figures.site import reader

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LOAD = reader(ROOT / "docs" / "results")


def speedup(report: str, temperature: str) -> str:
    """The default method's speed-up, as README writes it."""
    (entry,) = (entry for name, entry in contenders(LOAD(report), temperature).items() if name != AR)
    return f"{entry['speedup']:.2f}x"


def over_peer(report: str, name: str) -> str:
    """How much faster a contender is than llama.cpp, as README writes it."""
    return f"{contenders(LOAD(f'zen3/{report}'), '0')[name]['over_peer']:.2f}x"


def test_speedups_are_measured():
    measured = [(f"{machine}single_stream", temperature) for machine in ("", "zen4/", "zen3/") for temperature in "01"]
    peers = [("llama_cpp", "source"), ("llama_cpp", AR), ("llama_cpp_qwen_edits", "ngrams")]
    peers += [("llama_cpp_qwen_questions", "ngrams"), ("drafter_qwen", "drafter")]
    figures = [speedup(*one) for one in measured] + [over_peer(*one) for one in peers]
    assert re.findall(r"\b\d+\.\d+x", README) == figures


def test_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]
