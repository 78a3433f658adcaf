"""Where a run is, told to who has the token of its cluster but does not see its folder.

The controller's listener for agents is asked, and answers with the address of the run's coordinator and the salt of
its token; the token itself does not cross the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath

from elastune.cluster.agents import messages
from elastune.cluster.agents.messages import AgentRefused, RunAsked, RunFound
from elastune.core.errors import UserError
from elastune.elastic.protocol.client import ANSWER_LIMIT_S, DIAL_LIMIT_S, Contact
from elastune.elastic.protocol.entry import enter_at
from elastune.elastic.protocol.handshake import SALT_DIGITS, TokenRefused, derived
from elastune.elastic.protocol.transport import Lines, ProtocolError

RULE = "the run must be one of that controller's"
MOST_NAMED = 8


def answer(asked: RunAsked, runs: Mapping[Path, Contact]) -> RunFound | AgentRefused:
    """Which of ``runs``, by their folders, is asked for: a whole path, or the last parts of one that no other has."""
    wanted = PurePath(asked.out)
    found = [out for out in runs if out == wanted or (not wanted.is_absolute() and _ends(out, wanted))]
    if len(found) == 1:
        contact = runs[found[0]]
        return RunFound(contact.address, contact.token[:SALT_DIGITS])
    named = ", ".join(str(out) for out in (found or list(runs))[:MOST_NAMED]) or "none"
    return AgentRefused(f"{asked.out} may be each of {named}" if found else f"{asked.out}; it has {named}")


def _ends(out: PurePath, wanted: PurePath) -> bool:
    count = len(wanted.parts)
    return out.parts[len(out.parts) - count :] == wanted.parts


def find_run(address: str, token: str, out: Path) -> Contact:
    """How to reach the run in ``out`` of the controller at ``address`` ("host:port"), whose agents' token this is.

    Raises ``UserError``.
    """
    rule, fix = "a controller must answer there", "start it, or see the address and firewalls"
    words = messages.encode(RunAsked(str(out)))
    try:
        entered = enter_at(address, Lines(), token, messages.PURPOSE, words, ANSWER_LIMIT_S, dial_s=DIAL_LIMIT_S)
        entered.connection.close()
        told = messages.decode_told(entered.line)
    except TokenRefused as error:
        fix = "give the controller's own token file, and the address that it listens on for agents"
        raise UserError("a controller must let in who asks it", f"{address}: {error}", fix) from None
    except OSError as error:
        raise UserError(rule, f"{address}: {error.strerror or error}", fix) from None
    except (ValueError, ProtocolError) as error:
        fix = "use the same version of elastune as the controller, and the address that it listens on for agents"
        raise UserError(rule, f"{address}: {error}", fix) from None
    if isinstance(told, RunFound):
        return Contact(told.address, derived(token, told.salt))
    why = told.why if isinstance(told, AgentRefused) else f"{address} said {told.kind!r}"
    raise UserError(RULE, why, "name the folder of its results as the controller does, or its last part")
