"""What ties a program's model to other workers: it stays where it is."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from elastune.core.errors import UserError

SAVED_ELSEWHERE = "save by session.save and elastune export"
"""What to do in place of writing a model that lies in parts."""


class InPlace:
    """A copy of the model (an average of its weights, say) has the same one, and nothing that has it is pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickling()


def refuse_pickling() -> NoReturn:
    """Raise ``UserError`` for what would mean nothing without the workers that it was made for."""
    rule = "a model that workers have in parts is not pickled"
    fix = f"{SAVED_ELSEWHERE}, or use --mechanism replicated or zero"
    raise UserError(rule, "torch.save or pickle of the model or a module of it", fix)
