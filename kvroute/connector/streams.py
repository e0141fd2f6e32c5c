"""What a client makes of a stream of the OpenAI server, so that it can ask for routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cache_manager.errors import RowError
from kvroute.connector.answers import answers_of, field_of

OBJECTS = {"text_completion": "text_completion", "chat.completion.chunk": "chat.completion"}
"""What a stream's chunks and a whole answer call themselves."""


def gathered(chunks: Iterable[Any]) -> dict[str, Any]:
    """The answer that ``chunks`` are the stream of, completions or a chat; :func:`kvroute.connector.routes` takes it.

    ``chunks`` are all of one stream in order, JSON or a client's objects, without the ``[DONE]`` behind them. The
    answer has the id, and of each choice its tokens and why it ended. No chunk has a handle: the store has the routes.

    Raises :class:`RowError` for no chunk, for chunks of several answers or without token ids (``return_token_ids``),
    and for an error of the server's.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if (error := field_of(chunk, "error")) is not None:
            raise RowError("stream", "chunks of an answer", error)
        kind, request = OBJECTS.get(field_of(chunk, "object") or ""), field_of(chunk, "id")
        if kind is None or request is None:
            raise RowError("chunk.object", f"one of {sorted(OBJECTS)}, with an id", field_of(chunk, "object"))
        if answer.setdefault("id", request) != request:
            raise RowError("chunk.id", answer["id"], request)
        answer["object"] = kind
        if (prompt := field_of(chunk, "prompt_token_ids")) is not None:
            answer["prompt_token_ids"] = prompt
        for each in answers_of(chunk):
            _add(choices.setdefault(field_of(each, "index"), {"index": field_of(each, "index")}), each)
    if not choices:
        raise RowError("stream", "chunks of an answer", "no choice in any")
    for index, choice in choices.items():
        if "token_ids" not in choice or (answer.get("prompt_token_ids") or choice.get("prompt_token_ids")) is None:
            raise RowError(f"token ids of choice {index}", "a stream that was asked for with return_token_ids", "none")
    return {**answer, "choices": [choices[index] for index in sorted(choices)], "kv_transfer_params": None}


def _add(choice: dict[str, Any], part: Any) -> None:
    if (tokens := field_of(part, "token_ids")) is not None:
        choice.setdefault("token_ids", []).extend(tokens)
    for name in ("prompt_token_ids", "finish_reason", "stop_reason"):
        if (value := field_of(part, name)) is not None:
            choice[name] = value


__all__ = ["gathered"]
