"""Tool calls in a model's text: found while it is written, and forced where a request demands them.

Independent of any protocol's bodies:

    offer = service.tools.offer([Tool(name="f", parameters={...})], choice="auto", parallel=True)
    # None: no call will be read. Otherwise the engine gets `offer.params(params)`, and each result a parser:
    parser = offer.parser()
    for piece in pieces:
        for event in parser.feed(piece):
            ...  # Event(text), Event("", call, id, name) where a call begins, Event(text, call) within it
    parser.close()  # the last events

A call begins once, before its arguments; calls follow each other; their numbers count from 0.
Pieces of arguments join to the text of a JSON object as the model wrote it: cut short if the answer is
(`max_tokens`), and invalid JSON where the model wrote that. A marker is never shown as text, unless it turns
out that no call was meant; then all of it is. Without a call the texts join to what was fed. Cutting the text
differently only cuts the events differently.
"""
