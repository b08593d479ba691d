"""``python -m posttune_ray`` is ``posttune-ray``."""

import sys

from posttune_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
