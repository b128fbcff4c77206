"""python -m bench.static"""

import sys

from bench.static.cli import main

if __name__ == "__main__":
    sys.exit(main())
