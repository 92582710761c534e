"""`python -m redraft`, which torchrun starts as `-m redraft`."""

from redraft.cli import main

main()
