"""Model class for `lm_eval.simple_evaluate` that runs lm-eval's tasks on a kvq engine.

    import kvq, lm_eval
    from kvq.evals.lm_eval.model import KvqLM

    with kvq.LLM("tiny", kv="int4") as llm:
        results = lm_eval.simple_evaluate(model=KvqLM(llm), tasks=["hellaswag"], limit=100)

Tokenization, truncation, windows and stop strings follow lm-eval's `hf` model, so the figures with
unquantized KV are the same. `kvq.evals.lm_eval.tasks.run_tasks` compares KV formats. Importing this module
imports lm-eval, which the extra `eval` installs.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from kvq.engine import LLM, SamplingParams
from kvq.errors import ConfigError, RequestError
from kvq.evals.scoring import generate, score_continuations
from kvq.evals.watch import UNWATCHED, Progress
from kvq.extras import LM_EVAL, install_command, require
from kvq.models import Model
from kvq.models.parts.inputs import check_unicode

require("lm_eval:TASK", LM_EVAL)
try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(f"lm-eval 0.4.13 or later is needed ({error}); {install_command('eval')}") from error

_log = logging.getLogger("kvq")

_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
_WITHOUT_EFFECT = ("use_cache", "pad_token_id", "eos_token_id", "do_sample", "temperature")


class _Prompting(TypedDict, total=False):
    """Options of `KvqLM` that determine how prompts are built and where answers begin."""

    add_bos_token: bool | None  # None: the tokenizer's default
    prefix_token_id: int | None  # precedes texts without a context; by default BOS, else EOS
    chat_template_args: Mapping[str, Any] | None
    think_end_token: str | None  # answers begin after this text


# D40: lm-eval's own tasks, with the results of its `hf` model
class KvqLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval model that runs on a kvq engine, with many requests in flight at once.

    A context shared by several continuations is computed once, as far as it stays in the prefix cache. Unlike
    in `hf`, penalties in a model's generation_config have no effect; only a task's gen_kwargs set penalties.
    """

    backend = "causal"
    # Properties in lm-eval's class, plain attributes here
    device: Any = None
    tokenizer_name = ""
    eot_token_id: int | None = None
    prefix_token_id = -1

    def __init__(
        self,
        llm: LLM | Model,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 1234,
        **prompting: Unpack[_Prompting],
    ) -> None:
        """Wrap an engine, or create one for a model.

        `max_length`: maximum context in tokens, by default the engine's; one more token may be scored,
        because the last token is only predicted. `max_gen_toks`: default for tasks that do not set it.
        `seed`: for tasks that sample.

        Raises:
            ConfigError: the length exceeds the engine's context, or there is no token to precede a text.
            TypeError: an option is unknown.
        """
        if unknown := sorted(prompting.keys() - _Prompting.__annotations__.keys()):
            raise TypeError(f"KvqLM has no option {unknown[0]!r}")
        super().__init__()
        self.llm = llm if isinstance(llm, LLM) else LLM(llm)
        self.tokenizer = self.llm.model.tokenizer
        most = self.llm.core.max_context
        if max_length is not None and not 1 <= max_length <= most:
            raise ConfigError(f"max_length must be 1 to {most}, the engine's context, got {max_length}")
        self.max_length = max_length or most
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = prompting.get("add_bos_token")
        self.eot_token_id = self.tokenizer.eos_token_id
        known = (prompting.get("prefix_token_id"), self.tokenizer.bos_token_id, self.eot_token_id)
        self.prefix_token_id = next((token for token in known if token is not None), -1)
        if self.prefix_token_id < 0:
            raise ConfigError("the tokenizer has neither a BOS nor an EOS token; give prefix_token_id")
        self.device = self.llm.model.weights.device
        # Key of lm-eval's request cache
        self.tokenizer_name = str(self.tokenizer.name_or_path).replace("/", "__")
        self.progress: Progress = UNWATCHED.progress
        self._chat_template_args = dict(prompting.get("chat_template_args") or {})
        self._think_end_token = prompting.get("think_end_token")
        self._seed = seed

    # lm-eval's interface

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return token ids, by default including the tokenizer's special tokens, but never with a second BOS.

        Raises:
            RequestError: the string is not valid Unicode.
        """
        check_unicode(string, "a text of the task")
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            if has_bos_prefix(string, self.tok_decode([self.prefix_token_id], skip_special_tokens=False)):
                add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **options)
        return ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens to text."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as one prompt, omitting the system message if the template rejects it.

        Raises:
            RequestError: the tokenizer has no chat template, or the template rejects the conversation.
        """
        import jinja2

        spoken = [message for message in chat_history if message["role"] != "system"]
        try:
            return self._apply_template(chat_history, add_generation_prompt)
        except jinja2.exceptions.TemplateError as error:
            refused = error
        if len(spoken) < len(chat_history):
            _log.warning(
                "the chat template refuses a conversation (%s); leaving out its system message", refused
            )
            try:
                return self._apply_template(spoken, add_generation_prompt)
            except jinja2.exceptions.TemplateError as error:
                refused = error
        raise RequestError(f"the chat template refuses a conversation: {refused}") from refused

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability in nats, and whether greedy decoding would generate it.

        A context that is too long is truncated on the left.

        Raises:
            RequestError: a continuation has no tokens, or is longer than the model's context.
        """
        encoded = []
        for request in requests:
            context, continuation = request.args
            text = context.rstrip()  # trailing spaces belong to the continuation
            if text:
                pair = self._encode_pair(context, continuation)
            else:
                ids = self.tok_encode(context + continuation, add_special_tokens=False)
                pair = [self.prefix_token_id], ids[1:] if ids[:1] == [self.prefix_token_id] else ids
            encoded.append(((context, continuation), *pair))
        return self._loglikelihood_tokens(encoded)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text in nats, scored in windows as long as the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate text after each context, up to a stop string, the end token or max_gen_toks.

        A context that leaves too little room for max_gen_toks tokens is truncated on the left.

        Raises:
            RequestError: an option is unsupported, or more tokens are requested than fit in the context.
        """
        eos = None
        if self.eot_token_id is not None:
            eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        prompts, params, stops, num_cut = [], [], [], 0
        for index, request in enumerate(requests):
            context, gen_kwargs = request.args
            kwargs = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
            until = [stop for stop in handle_stop_sequences(kwargs.pop("until", None), eos) if stop]
            count = kwargs.pop("max_gen_toks")
            if not 0 < count < self.max_length:
                raise RequestError(
                    f"max_gen_toks={count} must be at least 1 and below the context of {self.max_length} "
                    f"tokens; change the task's generation_kwargs"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            num_cut += len(ids) > self.max_length - count
            prompts.append(ids[count - self.max_length :])
            params.append(self._sampling_params(kwargs, until, count, len(prompts[-1]), index))
            stops.append(until)
        _warn_of_cuts(num_cut, len(requests))
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=prompts.__getitem__)  # common prefixes are adjacent
        outputs = generate(
            self.llm, [prompts[i] for i in order], [params[i] for i in order], progress=self.progress
        )
        for i, output in zip(order, outputs, strict=True):
            text = self.tok_decode(output.outputs[0].token_ids)
            texts[i] = postprocess_generated_text(text, stops[i], self._think_end_token)
            self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    # Parts

    def _apply_template(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise RequestError("the tokenizer has no chat template; leave apply_chat_template out")
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._chat_template_args,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the scores of (texts or None, context ids, continuation ids) triples."""
        pairs, num_cut = [], 0
        for texts, context, continuation in requests:
            if not continuation:
                raise RequestError(f"a continuation has no tokens of its own: {texts!r:.300}")
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise RequestError(
                    f"a continuation of {len(continuation)} tokens is longer than the context of "
                    f"{self.max_length} tokens: {(texts or ('', ''))[1]!r:.100}"
                )
            num_cut += len(context) > room
            pairs.append((context[-room:] or [self.prefix_token_id], continuation))
        _warn_of_cuts(num_cut, len(requests))
        answers = score_continuations(self.llm, pairs, progress=self.progress)
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _sampling_params(
        self, kwargs: dict[str, Any], until: list[str], count: int, prompt_tokens: int, index: int
    ) -> SamplingParams:
        """Convert a task's normalized generation_kwargs to kvq's sampling parameters."""
        max_length = kwargs.pop("max_length", None)  # limit for prompt plus answer, as in transformers
        if max_length is not None:
            count = min(self.max_length - prompt_tokens, max_length - prompt_tokens)
        if kwargs.pop("num_beams", 1) != 1:
            raise RequestError("num_beams must be 1: beam search does not stop at strings; leave it out")
        options: dict[str, Any] = {
            name: kwargs.pop(name) for name in _SAMPLING if kwargs.get(name) is not None
        }
        if options.get("top_k") == 0:
            del options["top_k"]
        temperature = float(kwargs.get("temperature", 0.0))
        if kwargs.get("do_sample"):
            if temperature == 0:
                raise RequestError("do_sample: true needs a temperature above 0 in generation_kwargs")
            options["seed"] = int(options.get("seed", self._seed)) + index
        unknown = sorted(set(kwargs) - set(_WITHOUT_EFFECT) - set(_SAMPLING))
        if unknown:
            raise RequestError(
                f"generation_kwargs: kvq has no {', '.join(unknown)}; known: until, max_gen_toks, do_sample, "
                f"temperature, max_length, {', '.join(_SAMPLING)}"
            )
        return SamplingParams(
            max_tokens=count,
            temperature=temperature,
            stop=until,
            stop_token_ids=[] if self.eot_token_id is None else [self.eot_token_id],
            skip_special_tokens=False,  # stop strings may be special tokens
            **options,
        )


def _warn_of_cuts(number: int, requests: int) -> None:
    if number:
        _log.warning("%d of %d contexts lost tokens from the left", number, requests)
