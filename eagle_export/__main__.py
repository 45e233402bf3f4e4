"""`python -m eagle_export`: the same as the command."""

from eagle_export.cli.main import main

if __name__ == "__main__":
    main()
