"""`python -m dent` is the command `dent`, for `torchrun -m dent`."""

from dent.cli import main

if __name__ == "__main__":
    main()
