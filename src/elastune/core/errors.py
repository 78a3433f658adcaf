"""What elastune says when the user, a file or a machine breaks a rule."""

from __future__ import annotations


class UserError(Exception):
    """A broken rule, told in one line: the rule, the value that broke it, and the fix.

    The command line prints it and exits with code 2; nothing that already exists is changed.

    Args:
        rule: what must hold, as a sentence: "a batch holds at least one sample".
        value: what was given instead.
        fix: what to do about it.

    Example:
        >>> raise UserError("a batch holds at least one sample", 0, "use --set batch_size=64")
    """

    def __init__(self, rule: str, value: object, fix: str) -> None:
        super().__init__(rule, value, fix)
        self.rule = rule
        self.value = value
        self.fix = fix

    def __str__(self) -> str:
        shown = " ".join(str(self.value).split())
        return f"{self.rule} (got {shown}): {self.fix}"


class Diverged(Exception):
    """Training produced a loss or metric that is not finite: a result about the settings, not a bug.

    In a study such a trial is infeasible, with its reason, and the study goes on.
    """
