"""``python -m posttune`` is ``posttune``."""

import sys

from posttune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
