"""Who has the token is let in, and nobody else, whatever they have overheard."""

from __future__ import annotations

import pytest

from elastune.elastic.wire.contact import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    REFUSAL,
    RESPONSE_BYTES,
    SALT_DIGITS,
    TokenRefused,
    admit,
    challenge,
    derived,
    new_nonce,
    respond,
    verify,
)
from elastune.elastic.wire.transport import ProtocolError

TOKEN = "a token of this test"


def test_both_sides_prove_that_they_have_the_token_and_neither_says_it() -> None:
    nonce = new_nonce()
    challenged = challenge(nonce)
    response, expected = respond(TOKEN, "run", challenged, new_nonce())
    proof = admit(TOKEN, "run", nonce, response)
    verify(proof, expected)
    assert [len(line) for line in (challenged, response, proof, REFUSAL)] == [
        *(CHALLENGE_BYTES, RESPONSE_BYTES, PROOF_BYTES, PROOF_BYTES)
    ]
    assert TOKEN.encode() not in challenged + response + proof


def test_another_token_is_refused() -> None:
    nonce = new_nonce()
    response, expected = respond("another token", "run", challenge(nonce), new_nonce())
    with pytest.raises(TokenRefused):
        admit(TOKEN, "run", nonce, response)
    with pytest.raises(TokenRefused):
        verify(REFUSAL, expected)


def test_a_proof_that_was_overheard_is_of_no_use() -> None:
    """On another connection, at a server that is there for something else, or said back to who gave it."""
    nonce, own = new_nonce(), new_nonce()
    response, expected = respond(TOKEN, "run", challenge(nonce), own)
    with pytest.raises(TokenRefused):
        admit(TOKEN, "run", new_nonce(), response)
    with pytest.raises(TokenRefused):
        admit(TOKEN, "agents", nonce, response)
    with pytest.raises(ProtocolError, match="has not proved"):
        verify(response[len(own) + 1 :], expected)
    with pytest.raises(ProtocolError, match="has not proved"):  # of another connection to the same server
        verify(admit(TOKEN, "run", nonce, response), respond(TOKEN, "run", challenge(nonce), new_nonce())[1])


def test_a_server_cannot_be_made_to_prove_for_its_caller() -> None:
    """Who has no token answers a server's challenge by asking the same server, with the nonce turned round."""
    nonce = new_nonce()
    response, _ = respond(TOKEN, "run", challenge(nonce), nonce)
    proof = admit(TOKEN, "run", nonce, response)
    with pytest.raises(TokenRefused):
        admit(TOKEN, "run", nonce, nonce + b" " + proof)


def test_derived_tokens_are_made_of_their_salt_by_who_has_the_first() -> None:
    token = derived(TOKEN)
    assert token == derived(TOKEN, token[:SALT_DIGITS])
    assert (
        len({token[SALT_DIGITS:], derived(TOKEN)[SALT_DIGITS:], derived("x", token[:SALT_DIGITS])[SALT_DIGITS:]}) == 3
    )


@pytest.mark.parametrize("line", [b"", b"\n", b"HTTP/1.1 400 Bad Request\r\n", b"elastune-1 " + b"0" * 32 + b"\n",
                                  b"elastune-2 " + b"0" * 31 + b"\n", b"elastune-2 " + b"G" * 32 + b"\n"])  # fmt: skip
def test_a_server_that_speaks_another_protocol(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak elastune-2"):
        respond(TOKEN, "run", line, new_nonce())
