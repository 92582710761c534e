"""Drafting loops: beam search and random draws over any draft model, and the drafter's context cache."""
