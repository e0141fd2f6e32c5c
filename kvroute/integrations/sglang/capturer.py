"""SGLang's capturer of routed experts, replaced: it keeps SGLang's buffer on the device, and has no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from kvroute.capture.hooks import ONCE
from kvroute.capture.step_ids import OTHERS, REASONS
from kvroute.connector.left import Tokens
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.answers import Outbox, RequestRows
from kvroute.integrations.sglang.aside import Aside
from kvroute.integrations.sglang.handover import ARRIVAL, NOT_ASKED, Arrival, Handover, PackedTicket, put, room_of
from kvroute.integrations.sglang.passes import Ids, Launched
from kvroute.integrations.sglang.rows import NOTHING, RoutedRows
from kvroute.integrations.sglang.weights import Given

ANSWER: Final = "kvroute_answer"
"""The attribute of SGLang's request with its answer, from its end until its message."""
KEPT: Final = "kvroute_kept"
"""The attribute of SGLang's request with its rows of KV that it has given up."""
ASIDE: Final = "kvroute_aside"
"""The attribute with its rows while its KV is kept aside, to be resumed."""
GRAPH: Final = "a CUDA graph of ranks with requests of their own, whose order of tokens nothing has judged"


def _why(req: Any) -> Mapping[int, str]:
    """Why rows of a request's pages may be missing, whose KV came from another engine."""
    arrival: Arrival | None = getattr(req, ARRIVAL, None)
    return NOTHING if arrival is None else arrival.why


def _slots_in(req_to_token_pool: Any, index: int, tokens: int) -> Ids:
    """The slots of the first ``tokens`` of the request at this place of SGLang's pool, on the host."""
    slots: Ids = req_to_token_pool.req_to_token[index][:tokens].cpu().numpy().astype(np.int64)
    return slots


class Capturer:
    """Replaces SGLang's ``RoutedExpertsCapturer``: keeps its device buffer, without its buffer on the host.

    SGLang's buffer keeps the last call of a router, from row 0 on. So a pass in which a router was called twice, or
    with fewer tokens than the pass has, has no rows. A pass that replays a CUDA graph calls no router.
    Where ranks have requests of their own (attention data parallelism), a router has the tokens of all ranks, one rank
    after the other, each padded: those of this rank are a part of them, whose place SGLang's counts say. A router that
    had another number of tokens than the counts add up to has an order that is not known, and the pass has no rows.
    The buffer is emptied behind each pass: what a pass did not write is missing, and never of an earlier one.
    Without ``answers`` another rank answers this one's requests: the rows are there to be stored with the KV alone.
    With ``weights`` a pass has its ids and what the experts were given for them, or neither.
    """

    def __init__(self, theirs: Any, rows: RoutedRows, *, answers: bool = True, weights: Given | None = None) -> None:
        self.theirs, self.rows, self.answers, self._weights = theirs, rows, answers, weights
        self.req: Any = None
        """The request whose rows SGLang asks for next."""
        self._tokens: dict[int, list[int]] = {}  # of each call of a layer's router in this pass
        self._buffer: torch.Tensor = theirs.device_cache.buffer  # int32 [tokens, layers, top_k]
        self._buffer.fill_(-1)
        self._outbox: Outbox | None = None
        self._handover: Handover | None = None  # with prefill and decode apart
        self._slots: Any = None  # SGLang's table of the slots of requests
        self._drafting = False  # the draft model's pass is under way
        self._verifying: Launched | None = None  # its drafts are verified next
        self._carried: Launched | None = None  # the last pass whose end SGLang is to report

    def begin(self, *, drafting: bool = False) -> None:
        """A pass begins: earlier calls of routers, to warm up or to record a graph, are not its own.

        ``drafting``: it is the draft model's, whose routers are none of ours.
        """
        self._drafting = drafting
        if not drafting:
            self._empty(0)
            if self._weights is not None:
                self._weights.begin()

    def _empty(self, rows: int) -> None:
        """Nobody reads what is in the buffer any more; at least so many of its rows were written."""
        rows = max([rows, *(max(tokens) for tokens in self._tokens.values())])
        if rows:
            self._buffer[:rows].fill_(-1)
        self._tokens.clear()

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        """The choice int32 ``[tokens, top_k]`` of a layer's router."""
        if self._drafting:
            return
        if not torch.compiler.is_compiling():
            self._tokens.setdefault(layer_id, []).append(len(topk_indices))
        self.theirs.capture(layer_id=layer_id, topk_indices=topk_indices)

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Launched | None:
        part = versions.part_of(forward_batch)
        slots = versions.slots_of(forward_batch)[: part.tokens]
        ids: torch.Tensor | str = self._unheard(part, can_run_graph)
        if not ids:
            top_k = self.rows.spec.row_shape[1]
            ids = self._buffer[part.start : part.start + part.tokens, :, :top_k].clone()
        given: torch.Tensor | None = None
        if self._weights is not None and not isinstance(ids, str):
            taken = self._weights.take(part.tokens)
            if isinstance(taken, str):
                ids = taken  # never one without the other
            else:
                given = taken
        written = len(self._buffer) if part.shared and can_run_graph else max(part.tokens, cuda_graph_batch or 0)
        self._empty(written)  # behind the copy, on the same stream
        if not part.tokens:  # the other ranks' pass, whose end SGLang does not report here
            return None
        drafts = versions.verifies_drafts(forward_batch)
        launched = self.rows.launch(slots.clone(), ids, slots, drafts=drafts, given=given)
        self._verifying = launched if drafts else None
        if no_copy_to_cpu or drafts:
            self._carried = launched
            return launched
        launched.finalize()
        return None

    def accepted(self, index: torch.Tensor, lengths: torch.Tensor) -> None:
        """SGLang has verified the drafts of the last pass: see :meth:`Launched.accept`."""
        if self._verifying is not None:
            self._verifying.accept(index, lengths)
            self._verifying = None

    def carry(self, result: Any) -> None:
        """SGLang's result of the last pass, which does not always have that pass, and reports its end."""
        if result.routed_experts_output is None:
            result.routed_experts_output = self._carried
        self._carried = None

    def _unheard(self, part: versions.Part, can_run_graph: bool) -> str:
        """Why the buffer has not the ids of this pass; empty if it has."""
        if part.shared and can_run_graph:
            return GRAPH
        for layer, calls in self._tokens.items():
            if len(calls) > 1:
                return f"{REASONS[ONCE]}: that of layer {layer}, with {calls} tokens of {part.routed}"
            if calls[0] < part.routed or (part.shared and calls[0] > part.routed):
                return f"{OTHERS}: that of layer {layer}, {calls[0]} of {part.routed}"
        return ""

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> torch.Tensor:
        """SGLang's field of :attr:`req`, which is over. It is filled before the request's message goes."""
        if not self.answers:  # SGLang has no use for it here, but for its shape
            return torch.zeros((max(0, seqlen - 1 - start_len), *self._buffer.shape[1:]), dtype=torch.int32)
        slots = _slots_in(req_to_token_pool, req_pool_idx, seqlen - 1)
        req = self.req
        ids = [*req.origin_input_ids, *req.output_ids_through_stop]
        tokens: Tokens | None = Tokens(ids, len(req.origin_input_ids))
        if req.input_embeds is not None or req.positional_embed_overrides is not None:
            tokens = None  # SGLang gives such a prompt the same ids whatever it says
        kept = vars(req).pop(KEPT, None)
        if self._handover is not None:
            self._handover.poll()
        answer = self.rows.answer(req.rid, slots, min(start_len, len(slots)), tokens, kept, _why(req))
        setattr(req, ANSWER, answer)
        return answer.field

    def retracted(self, req: Any, req_to_token_pool: Any) -> None:
        """A request is about to give up its KV, and will compute its tokens again, perhaps with other weights: keep the
        rows that they were sampled with."""
        if not req.return_routed_experts or not self.answers:
            return
        if req.input_embeds is not None:  # SGLang begins its answer anew
            vars(req).pop(KEPT, None)
            return
        earlier = getattr(req, KEPT, None)
        sampled = len(req.origin_input_ids) + len(req.output_ids) - 1  # positions that were read for sampled tokens
        if not req.output_ids or (isinstance(earlier, RequestRows) and sampled <= earlier.stop):
            return
        slots = _slots_in(req_to_token_pool, versions.pool_row(req), sampled)
        setattr(req, KEPT, self.rows.kept(slots, 0, earlier, _why(req)))

    # ---------------------------------------------------------------- prefill and decode apart

    def hand_over(self, handover: Handover, req_to_token_pool: Any) -> None:
        """The engine lends or fetches rows from now on; the ``handover`` is owned."""
        self._handover, self._slots = handover, req_to_token_pool

    def lend(self, req: Any, buffers: Any) -> None:
        """SGLang sends the last of a prompt's KV, and with it what is in ``buffers``."""
        if self._handover is None:
            return
        if req.return_routed_experts:
            ids = list(req.origin_input_ids)
            ticket = self._handover.lend(ids, self._slots_of(req, len(ids)), room_of(req))
        else:
            ticket = PackedTicket(why=NOT_ASKED)
        put(ticket, req, buffers)

    def goes_on(self, decode_req: Any, buffers: Any) -> bool:
        """Whether a request, whose KV has come, may run: its rows have come too, or it has waited long enough."""
        if self._handover is None:
            return True
        req = decode_req.req
        arrival: Arrival | None = getattr(req, ARRIVAL, None)
        if arrival is None or arrival.receiver is not decode_req.kv_receiver:  # of this transfer, not an earlier one
            words = buffers.bootstrap_room[decode_req.metadata_buffer_index, 1:].cpu().numpy()
            ids = [*req.origin_input_ids, *req.output_ids][: req.kv.kv_committed_len]
            slots = self._slots_of(req, len(ids))
            arrival = self._handover.receive(PackedTicket.read(words), ids, slots, wanted=req.return_routed_experts)
            arrival.receiver = decode_req.kv_receiver
            setattr(req, ARRIVAL, arrival)
        return self._handover.goes_on(arrival)

    def put_aside(self, req: Any) -> None:
        """SGLang copies the KV of a request aside, which it retracts."""
        aside = Aside()
        if req.return_routed_experts:
            aside.keep(self.rows, self._slots_of(req, req.seqlen - 1))
        setattr(req, ASIDE, aside)

    def bring_back(self, req: Any) -> None:
        aside: Aside | None = vars(req).pop(ASIDE, None)
        if aside is not None:
            aside.bring_back(self.rows, self._slots_of(req, req.seqlen - 1))

    def _slots_of(self, req: Any, tokens: int) -> Ids:
        return _slots_in(self._slots, req.kv.req_pool_idx, tokens)

    def destroy(self) -> None:
        if self._handover is not None:
            self._handover.close()
        self.rows.close()

    # ---------------------------------------------------------------- what goes out

    def stream(self, stream: Callable[[list[Any]], object], sender: Any, reqs: Sequence[Any]) -> None:
        """SGLang streams what is new of these requests by ``stream``, to its ``sender``.

        Those that are over and have asked for their rows get messages of their own: one is sent now, with the answers
        that are ready, the other one later.
        """
        others = [req for req in reqs if not hasattr(req, ANSWER)]
        over = [(req, vars(req).pop(ANSWER)) for req in reqs if hasattr(req, ANSWER)]
        if others or not over:
            stream(others)
        ready = {req.rid for req, answer in over if answer.ready}
        for is_ready in (True, False):
            group = [(req, answer) for req, answer in over if (req.rid in ready) is is_ready]
            if not group:
                continue
            self._outbox = self._outbox or Outbox(sender)
            answers = {req.rid: answer for req, answer in group}
            for message in self._outbox.kept(partial(stream, [req for req, _ in group])):
                self.rows.answers.send(self._outbox, message, answers)


def capturer() -> Capturer | None:
    """This process's capturer, or ``None``."""
    current = versions.experts_capturer()
    return current if isinstance(current, Capturer) else None


__all__ = ["ANSWER", "GRAPH", "KEPT", "Capturer", "capturer"]
