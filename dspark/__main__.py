"""`python -m dspark ...` is `dspark ...`."""

import sys

from dspark.cli import main

if __name__ == "__main__":
    sys.exit(main())
