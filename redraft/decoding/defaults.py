"""Numbers that were fitted on answers of SmolLM2-135M-Instruct, and serve every model. No text depends on them: they
only say which nodes are worth a row. `redraft tune` fits NGRAM_CHANCES, JOINT_ODDS and SCORES anew to a bundle's own
model, and writes them into the bundle.
"""

from __future__ import annotations

from types import MappingProxyType

NGRAM_CHANCES = MappingProxyType(
    {
        6: (0.80, 0.95, 0.99, 0.99),
        4: (0.62, 0.81, 0.91, 0.96),
        3: (0.49, 0.77, 0.84, 0.92),
        2: (0.40, 0.69, 0.83, 0.91),
        1: (0.14, 0.36, 0.53, 0.70),
    }
)
"""How often an n-gram guess is right, by the number of tokens matched and by how often in a row (1, 2, 3, 4 or more
times) the same token followed them. Source: counted in the model's greedy answers."""
TEXT_CHANCES = MappingProxyType(
    {
        16: (0.95, 0.97, 0.95, 0.98),
        12: (0.90, 0.92, 0.92, 0.94),
        8: (0.78, 0.72, 0.75, 0.90),
        6: (0.66, 0.64, 0.65, 0.85),
        4: (0.55, 0.53, 0.58, 0.66),
        3: (0.35, 0.38, 0.42, 0.57),
        2: (0.22, 0.27, 0.27, 0.52),
        1: (0.08, 0.12, 0.20, 0.21),
    }
)
"""The same of guesses from texts of other requests, until the store has seen how often its own are right. Source:
counted in the model's greedy answers to MT-bench and to benchmarks/served/edits.jsonl, and rounded down where few were
seen."""
SUCCESSOR_CHANCE = 0.25
"""How often a token's usual successor in teacher data comes next where no match is likelier. Source: by hand."""
JOINT_ODDS = MappingProxyType({True: (1 / 3, 1.0), False: (1 / 2, 4.0)})
"""The two factors of `growth.joint_odds`, by whether the drafter reads the context. Source: fitted to how
often guesses came true in the model's answers, by their n-gram chance and the drafter's probability."""
HIDDEN_SHARE = 0.3
"""Share of the chances of forbidden tokens that goes to allowed ones which nobody proposed. Source: set by hand. Over
2570 tokens of answers to benchmarks/schemas.jsonl the log-likelihood is -0.808 a token; at best, with 0.2 to 0.25, it
is -0.806."""
SCORES = (
    {"temperature": 0.0},
    {"temperature": 0.7, "ngram_odds": 0.45},
    {"temperature": 1.0, "sharpness": 0.9, "ngram_odds": 0.4},
)
"""The scores of a method that was not fitted: see `Scores`. Source: about what `redraft tune` fits to
benchmarks/prompts.jsonl with the shipped recurrent drafter."""
