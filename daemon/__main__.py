"""`python -m batond.daemon` is `batond`."""

import sys

from batond.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
