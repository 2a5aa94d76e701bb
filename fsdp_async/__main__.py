"""`python -m fsdp_async` is `fsdp-async`."""

import sys

from fsdp_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
