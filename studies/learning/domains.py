"""Two domains that the shipped drafter has not seen: SQL over one schema, and support answers in one style.

Prompts are put together from parts by a seed. The two sets of a domain share parts and no prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

SCHEMA = """patients(patient_id, name, birth_year, city, insurer_id)
insurers(insurer_id, name, country)
doctors(doctor_id, name, speciality, ward_id)
wards(ward_id, name, floor, beds)
visits(visit_id, patient_id, doctor_id, day, cost, diagnosis)"""
COUNTED = ("visits", "patients", "doctors", "beds", "insurers")
OF_EACH = ("doctor", "ward", "insurer", "city", "speciality", "patient", "diagnosis", "floor")
MEASURES = ("the total cost", "the average cost", "the highest cost", "the number of visits", "the number of patients")
CONDITIONS = (
    "in {year}",
    "after {year}",
    "that cost more than {cost}",
    "of patients born before {year}",
    "on floor {floor}",
    "in the city of {city}",
    "of doctors whose speciality is {speciality}",
)
CITIES = ("Bergen", "Turin", "Lyon", "Graz", "Porto", "Ghent", "Aarhus", "Split", "Bilbao", "Basel")
SPECIALITIES = ("cardiology", "neurology", "surgery", "dermatology", "paediatrics", "oncology", "radiology")

STYLE = (
    "You answer for the Nordlys shop. Greet the customer by name, say sorry once, name the order number, list three "
    "numbered steps, and close with 'Warm regards, the Nordlys team'."
)
NAMES = (
    "Ada",
    "Bo",
    "Chidi",
    "Dana",
    "Emil",
    "Freya",
    "Goran",
    "Hanna",
    "Iris",
    "Jonas",
    "Kaya",
    "Lars",
    "Mina",
    "Noor",
)
THINGS = ("lamp", "kettle", "desk", "rug", "clock", "chair", "blanket", "shelf", "mirror", "toaster", "tent", "bicycle")
TROUBLES = (
    "arrived broken",
    "has not arrived",
    "is the wrong colour",
    "has a missing part",
    "was charged twice",
    "stopped working after {days} days",
    "is too small, and I want another size",
    "came without a receipt",
)
WISHES = ("a refund", "a replacement", "a discount", "to know when it comes", "to return it", "to speak to somebody")


@dataclass(frozen=True)
class Domain:
    """A domain: its one system prompt, and what makes one user turn."""

    system: str
    turn: Callable[[random.Random], str]

    def prompts(self, count: int, seed: int) -> list[list[dict[str, str]]]:
        """So many different prompts, each a list of chat messages. Those of odd and even seeds have none in common."""
        return [
            [{"role": "system", "content": self.system}, {"role": "user", "content": turn}]
            for turn in islice(self._turns(seed), count)
        ]

    def _turns(self, seed: int) -> Iterator[str]:
        rng, seen = random.Random(seed), set[str]()
        while True:
            turn = self.turn(rng)
            if turn not in seen and random.Random(turn).getrandbits(1) == seed % 2:
                seen.add(turn)
                yield turn


def _sql_turn(rng: random.Random) -> str:
    condition = rng.choice(CONDITIONS).format(
        year=rng.randrange(1950, 2026),
        cost=rng.randrange(50, 2000, 50),
        floor=rng.randrange(1, 12),
        city=rng.choice(CITIES),
        speciality=rng.choice(SPECIALITIES),
    )
    kind = rng.randrange(3)
    if kind == 0:
        return f"How many {rng.choice(COUNTED)} are there for each {rng.choice(OF_EACH)}, only those {condition}?"
    if kind == 1:
        return f"Show {rng.choice(MEASURES)} for each {rng.choice(OF_EACH)}, for visits {condition}."
    return f"List the {rng.randrange(3, 30)} {rng.choice(OF_EACH)}s with {rng.choice(MEASURES)} {condition}."


def _support_turn(rng: random.Random) -> str:
    trouble = rng.choice(TROUBLES).format(days=rng.randrange(2, 60))
    return (
        f"I am {rng.choice(NAMES)}. My {rng.choice(THINGS)}, order {rng.randrange(1000, 9999)}, {trouble}. "
        f"I would like {rng.choice(WISHES)}."
    )


DOMAINS = {
    "sql": Domain(
        f"You write one SQL query, and explain each clause in a line, for these tables:\n{SCHEMA}", _sql_turn
    ),
    "support": Domain(STYLE, _support_turn),
}
