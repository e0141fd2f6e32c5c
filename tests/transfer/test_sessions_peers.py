"""Several peers of one session, and peers that come back: none waits for another one."""

from __future__ import annotations

from session_pair import D_RUN, E_RUN, LIMITS, NAMESPACE, P_RUN, PARTS, D, E, P, Pair, T, blocks, hello, want, wanted

from transfer.actions import Send
from transfer.counters import Counters
from transfer.identity import Identity
from transfer.link import Peer
from transfer.messages import Hello, Pull, TransferId
from transfer.offers import Offers


def test_a_pull_after_its_peer_was_lost_says_hello_at_once() -> None:
    """Goal: prefill that was started anew is asked without a pause. Method: the peer is lost just after its welcome."""
    pair = Pair()
    pair.offer(blocks(1))
    pair.pull(1)
    pair.decode.peer_lost(P)
    again = TransferId(bytes(16))
    actions = pair.decode.pull(P, again, wanted(1), pair, pair.now_s)
    assert [type(action.message) for action in actions if isinstance(action, Send)] == [Hello]


def test_records_that_were_refused_are_tried_again_whatever_another_peer_refuses() -> None:
    """Goal: a peer that reads gets its records. Method: another one pulls again and again, and reads nothing."""
    offers = Offers(Identity(P_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    for peer, run, of in ((D, D_RUN, T), (E, E_RUN, TransferId(bytes(16)))):
        offers.receive(peer, hello(run), 0.0)
        offers.offer(of, blocks(1), 0.0)
    offers.receive(D, Pull(D_RUN, T, 1, want(1)), 0.0)
    refused = offers.next_records()
    assert refused is not None
    offers.unsent(refused, 0.0)
    sent, now_s = list[Peer](), 0.0
    for epoch in range(1, 20):
        now_s += LIMITS.resend_s / 2
        offers.receive(E, Pull(E_RUN, TransferId(bytes(16)), epoch, want(1)), now_s)
        offers.tick(now_s)
        while (send := offers.next_records()) is not None:
            sent.append(send.peer)
            if send.peer == E:
                offers.unsent(send, now_s)
    assert D in sent
