"""Runs the few tests that failed once more, one at a time: ``make test`` calls it after a run that failed.

A test that fails beside two others and passes alone counts on more of the machine than it has. That is a defect, of the
test or of what it tests, and is told by name; it does not hide whether the rest of a change works. Many failures are no
matter of timing: those are not run again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

AT_MOST = 5
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """The exit code of the second run, or 1 where there is none."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) <= AT_MOST:
        print(f"{len(failed)} tests failed; at most {AT_MOST} are run again", flush=True)
        return 1
    print("\nThese failed beside others, and are run again alone:", *failed, sep="\n  ", flush=True)
    code = int(pytest.main(["-q", "--last-failed", "--last-failed-no-failures", "none", "-m", "not soak"]))
    if code == 0:
        print(f"\n{len(failed)} FAILED BESIDE OTHERS AND PASSED ALONE (mend them):", *failed, sep="\n  ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
