"""`python -m redraft.cli`."""

from redraft.cli import main

main()
