"""Tool calls in a model's text: parsed while it is generated, and forced if a request requires them.

This package does not depend on any protocol's bodies:

    offer = service.tools.offer([Tool(name="f", parameters={...})], choice="auto", parallel=True)
    # None: no call will be read. Otherwise the engine gets `offer.params(params)`, and each result a parser:
    parser = offer.parser()
    for piece in pieces:
        for event in parser.feed(piece):
            ...  # Event(text), Event("", call, id, name) where a call begins, Event(text, call) within it
    parser.close()  # the last events

A call begins once, before its arguments. Calls come one after another, numbered from 0. The pieces of a
call's arguments join to the text of a JSON object as the model wrote it: truncated if the answer is truncated
(`max_tokens`), and invalid if the model wrote invalid JSON. A marker is shown as text only if it turns out
that no call was meant. Without a call, the texts join to the input. Splitting the input differently only
splits the events differently.
"""
