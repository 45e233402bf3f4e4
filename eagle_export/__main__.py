"""`python -m eagle_export`: the same as the command."""

from eagle_export.cli import main

main()
