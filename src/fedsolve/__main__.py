"""`python -m fedsolve`: the same as the `fedsolve` command."""

from fedsolve.cli.main import main

if __name__ == "__main__":
    main()
