"""``python -m elastune`` and ``torchrun -m elastune``: the command line."""

import sys

from elastune.cli import main

sys.exit(main())
