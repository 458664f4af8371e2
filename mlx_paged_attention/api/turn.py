"""Turn: what the answers to one conversation must look like, and how they are read."""

from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_paged_attention.api.answers import Answers
from mlx_paged_attention.api.tools import ToolChoice
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text.answer_grammar import AnswerGrammar
from mlx_paged_attention.text.thinking import thinking_of

if TYPE_CHECKING:
    from mlx_paged_attention.text.tokenizer import Tokenizer


class Turn:
    """The assistant's turn in a conversation, in which a model may think, call tools and answer.

    Args:
        params: how its tokens are chosen, the form of its text included.
        parallel: an answer may make several calls.
        continued: the text that it goes on with, if it does not begin.

    Attributes:
        answers: reads them.

    Raises:
        InvalidRequestError: the parameters do not go together.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        choice: ToolChoice,
        params: SamplingParams,
        *,
        parallel: bool = True,
        continued: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._parallel = parallel
        self._continued = continued
        if continued is not None and params.thinking_token_budget is not None:
            raise InvalidRequestError(
                "thinking_token_budget: does not go with continue_final_message, as what has been thought "
                "before is not counted; leave one of them out",
                "thinking_token_budget",
            )
        self._enforced = _enforces_calls(choice, params)
        self._format = tokenizer.answer_format
        if self._enforced:
            self._format = self._format.with_json_calls()
        shown = tokenizer.answer_special_ids(tools=bool(choice.offered))
        self._params = replace(params, shown_special_ids=(*params.shown_special_ids, *shown))
        self.answers = Answers(
            tokenizer, self._format, tools=choice.offered, parallel=parallel, continued=continued
        )

    def params(self, prompt_token_ids: list[int]) -> SamplingParams:
        """The parameters of its answers, with the grammar of what they must look like, if they must.

        Raises:
            InvalidRequestError: that cannot be enforced.
        """
        form = self._params.structured_outputs
        if form is None and not self._enforced:
            return self._params
        choice = self._choice
        thinking = thinking_of(self._tokenizer, prompt_token_ids, self._continued)
        grammar = AnswerGrammar(
            self._format,
            self._tokenizer.added_tokens,
            thinking,
            begun=self._continued is not None and thinking == "over",
            tools=choice.forced or choice.offered,
            parallel=self._parallel and not choice.is_named,
        )
        if not self._enforced:
            whole = grammar.of_form(structured_outputs(form))
        elif choice.forced:
            whole = grammar.of_calls()  # a form is of the text, of which there is none
        elif form is not None:
            whole = grammar.of_form_or_calls(structured_outputs(form))
        else:
            whole = grammar.of_text_and_calls()
        return replace(self._params, structured_outputs=whole)


def _enforces_calls(choice: ToolChoice, params: SamplingParams) -> bool:
    """Whether a grammar has to write the calls."""
    form = params.structured_outputs
    if not (choice.forced or choice.is_strict or (choice.offered and form is not None)):
        return False
    for name, given in (
        ("use_beam_search", params.use_beam_search),
        ("allowed_token_ids", params.allowed_token_ids is not None),
    ):
        if given:
            raise InvalidRequestError(f"{name}: does not go with tool calls that are enforced", name)
    return True
