"""`python -m ringspan` is the command line."""

from ringspan.cli import main

main()
