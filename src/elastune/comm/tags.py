"""Numbers that tell messages between two workers of a group apart: each kind of traffic has its own.

Two kinds with one number would take each other's messages wherever both are under way.
"""

from __future__ import annotations

POINT_TO_POINT_TAG = 1  # one for all, so that what is sent in order is received in order
POST_TAG = 2
CALLS_TAG = 3  # of named collectives (train.collectives), which may be beside anything else
OFFERS_TAG = 4
EXCHANGE_TAG = 5  # of state that moves between workers
FIRST_ROUTE_TAG = 16  # of sums along the routes of a topology (comm.relay), and so are all above
