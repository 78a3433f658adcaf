"""The form that all messages share: their kinds, their text, and what is refused."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from elastune.elastic.wire import messages as run
from elastune.runtime.agents import messages as agents
from elastune.runtime.agents import transfer_messages as files

UNIONS: list[Any] = [
    run.Message,
    agents.AgentMessage,
    agents.ControllerMessage,
    files.FileRequest,
    files.FileReply,
]


@pytest.mark.parametrize("message", [message for union in UNIONS for message in get_args(union)])
def test_a_kind_is_the_name_of_its_class(message: type) -> None:
    assert message.kind == re.sub(r"(?<=[a-z])([A-Z])", r"_\1", message.__name__).lower()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (run.CODEC, run.Broken(3, "Größe ☂ 𝄞")),
        (agents.FROM_CONTROLLER, agents.EndWorker(1, "Größe ☂ 𝄞")),
        (files.FROM_CONTROLLER, files.Refused("Größe ☂ 𝄞")),
    ],
)
def test_text_travels_as_utf_8(codec: Any, message: Any) -> None:
    line = codec.encode(message)
    assert "Größe ☂ 𝄞".encode() in line
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert codec.decode(line) == message


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    """Messages of agents cannot hold one: their texts have a greatest length, and pydantic refuses it there."""
    broken = run.CODEC.decode(run.CODEC.encode(run.Broken(3, "half \ud800 a pair")))
    assert broken == run.Broken(3, "half ? a pair")
    with pytest.raises(ValueError, match="valid string"):
        agents.EndWorker(1, "half \ud800 a pair")


@pytest.mark.parametrize(
    ("codec", "line"),
    [
        (run.CODEC, b'{"kind":"noticed","seconds":NaN}'),
        (run.CODEC, b'{"kind":"noticed","seconds":"3"}'),
        (run.CODEC, b'{"kind":"noticed","seconds":3,"more":1}'),
        (run.CODEC, b'{"kind":"agent_bye"}'),
        (agents.FROM_AGENT, b'{"kind":"preemption_noticed","seconds":Infinity}'),
        (agents.FROM_AGENT, b'{"kind":"worker_started","key":"1","pid":2}'),
        (agents.FROM_AGENT, b'{"kind":"agent_bye"}'),  # the controller's
        (files.FROM_CONTROLLER, b'{"kind":"send_from","offset":"1"}'),
        (files.FROM_CONTROLLER, b'{"kind":"send_from","offset":1,"more":1}'),
        (files.FROM_CONTROLLER, b'{"kind":"files_hello"}'),  # the agent's
    ],
)
def test_reading_is_strict(codec: Any, line: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        codec.decode(line)


def test_a_value_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="finite number"):
        run.Noticed(float("nan"))
