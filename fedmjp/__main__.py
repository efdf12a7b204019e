"""`python -m fedmjp` is the command `fedmjp`."""

import sys
from pathlib import Path

from fedmjp.cli import main

if __name__ == "__main__":
    # Python puts the working directory first, where a folder may have the name of one of our packages.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
