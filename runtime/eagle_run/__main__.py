"""`python -m eagle_run`: the same as the command."""

from eagle_run.cli.main import main

if __name__ == "__main__":
    main()
