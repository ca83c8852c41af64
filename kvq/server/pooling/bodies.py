"""Request bodies of embeddings (OpenAI's), scores (vLLM's) and ranked documents (Cohere's and Jina's)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from kvq.server.admission.bodies import KIND_OF_PROMPT, CacheSalt, Count, Name, TokenIds
from kvq.server.http.ignored import Body, check_usual
from kvq.server.http.strict_json import Flag, LongText

MAX_TEXTS = 2048  # limit per request
_Texts = Annotated[list[LongText], Field(min_length=1, max_length=MAX_TEXTS)]
_Inputs = Annotated[
    Annotated[LongText, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[_Texts, Tag("texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS), Tag("lists")],
    KIND_OF_PROMPT,
]


class _Pooled(Body):
    """Fields of all requests for vectors or scores."""

    LABELS: ClassVar = frozenset(("user", "metadata", "safety_identifier"))
    model: Name | None = None
    priority: Literal["interactive", "batch"] | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingsBody(_Pooled):
    """`POST /v1/embeddings`."""

    input: _Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None


class ScoreBody(_Pooled):
    """`POST /v1/score`: one first text for all second ones, or one for each."""

    text_1: LongText | _Texts
    text_2: LongText | _Texts

    @model_validator(mode="after")
    def _are_pairs(self) -> "ScoreBody":
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise ValueError(f"{len(first)} texts in text_1 make no pairs with {len(second)} in text_2")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score, in order."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        return list(zip(first if len(first) == len(second) else first * len(second), second, strict=True))


class _Document(Body):
    """Document with its text in a field, as Cohere's and Jina's clients may send it."""

    text: LongText


class RerankBody(_Pooled):
    """`POST /v1/rerank`."""

    USUAL: ClassVar = {"rank_fields": ["text"]}
    query: LongText
    documents: Annotated[list[LongText | _Document], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Count | None = None  # best documents to return
    return_documents: Flag = True
    _is_usual = model_validator(mode="before")(check_usual)

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]
