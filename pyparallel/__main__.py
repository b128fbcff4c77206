import sys

from pyparallel.cli import main

sys.exit(main())
