"""`python -m fedmjp` is the command `fedmjp`."""

from fedmjp.cli import main

if __name__ == "__main__":
    main()
