"""What only the model's vocabulary can tell about a request's parameters."""

from kvq.engine.params import SamplingParams
from kvq.errors import RequestError


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model can't generate.

    Raises:
        RequestError: logit_bias or stop_token_ids name a token of `vocab_size` or above.
    """
    for name, tokens in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        beyond = [token for token in tokens if token >= vocab_size]
        if beyond:
            raise RequestError(
                f"{name} may name tokens 0 to {vocab_size - 1}, the model's vocabulary, got "
                f"{', '.join(map(str, beyond[:5]))}{', ...' if len(beyond) > 5 else ''}; leave them out"
            )
