"""`python -m pcpbench`."""

from pcpbench.cli import main

main()
