"""Tuning: how many nodes a bundle's methods draft for each number of running sequences, from measurements."""
