"""Run the command `dent` by `python -m dent` or `torchrun -m dent`."""

from dent.cli import main

if __name__ == "__main__":
    main()
