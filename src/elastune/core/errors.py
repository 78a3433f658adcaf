"""The errors of elastune: a user, a file or a machine has broken a rule, or a training has diverged."""

from __future__ import annotations

import inspect

from elastune.core.pages import page_of
from elastune.core.text import cut, printable

LONGEST = 3000  # characters of each part of a message: what is longer hides the others


class UserError(Exception):
    """A broken rule, in one line: the rule, the value that broke it, the fix, and the page that tells more.

    The command line prints it and exits with code 2; nothing that already exists is changed. The page is that of the
    file which raises the error (``core/pages.py``), where the fix names none.

    Args:
        rule: What must hold, as a sentence: "a batch holds at least one sample".
        value: What was given instead.
        fix: What to do about it.
        page: The page of an error that was raised elsewhere and told in these words (``told``); None: raised here.

    Example:
        >>> raise UserError("a batch holds at least one sample", 0, "use --set batch_size=64")
    """

    def __init__(self, rule: str, value: object, fix: str, page: str | None = None) -> None:
        super().__init__(rule, value, fix)
        self.rule = rule
        self.value = value
        self.fix = fix
        if page is None:
            here = inspect.currentframe()
            maker = None if here is None else here.f_back
            page = "" if maker is None else page_of(str(maker.f_globals.get("__name__", "")))
            del here, maker  # a frame that knows itself keeps what all of its callers hold, until the garbage goes
        self.page = page

    @property
    def told(self) -> tuple[str, str, str, str]:
        """Its words, for another process: ``UserError(*told)`` says there what this error says here."""
        return self.rule, str(self.value), self.fix, self.page

    def __str__(self) -> str:
        rule, shown, fix = (cut(text, LONGEST) for text in (self.rule, " ".join(str(self.value).split()), self.fix))
        line = printable(f"{rule} (got {shown}): {fix}")
        return line if not self.page or ".md" in fix else f"{line} ({self.page})"


class Diverged(Exception):
    """A training gave a loss or metric that is not finite, or has exploded: a result of the settings, not a bug.

    In a study such a trial is infeasible; the study keeps the reason and goes on.
    """
