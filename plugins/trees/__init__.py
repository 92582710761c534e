"""Draft trees on the host: growing, cutting, packing and walking them, without a Python object for each node."""
