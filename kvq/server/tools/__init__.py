"""Tool calls in a model's output: parsed during generation, and forced if a request requires them.

This package does not depend on the request bodies of any protocol:

    offer = service.tools.offer([Tool(name="f", parameters={...})], choice="auto", parallel=True)
    # None: calls are not parsed. Otherwise, pass `offer.params(params)` to the engine, and parse each result:
    parser = offer.parser()
    for piece in pieces:
        for event in parser.feed(piece):
            ...  # Event(text), Event("", call, id, name) at the start of a call, Event(text, call) within it
    parser.close()  # the last events

Each call has one start event, before its arguments. Calls are sequential and numbered from 0. The argument
pieces of a call concatenate to a JSON object as the model wrote it: truncated if the output is truncated
(`max_tokens`), and invalid if the model wrote invalid JSON. A marker is shown as text only if it does not
belong to a call. If there is no call, the text events concatenate to the input. How the input is split
affects only how the events are split.
"""
