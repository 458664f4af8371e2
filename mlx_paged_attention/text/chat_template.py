"""ChatTemplate: the Jinja template that turns a conversation into the text of a prompt.

The environment is set up as Hugging Face's is, since that is what templates are written for:
https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_paged_attention.errors import InvalidRequestError, ModelLoadError


class ChatTemplate:
    """A model's chat template, compiled once.

    Args:
        source: the Jinja text, or several by name: ``"default"`` is the one to use, ``"tool_use"`` the one
            for conversations with tools.
        special_tokens: what the template may refer to: ``bos_token``, ``eos_token``, …, as text.

    Attributes:
        variables: the names that the templates read, such as ``tools``.

    Raises:
        ModelLoadError: a template does not compile.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in self.sources.items()}
            parsed = [environment.parse(text) for text in self.sources.values()]
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the model's chat template does not compile: {error}") from error
        self._tells_no_content = any(
            test.name == "none" and _is_content(test.node)
            for tree in parsed
            for test in tree.find_all(nodes.Test)
        )
        # Not those that are undeclared: templates set a default for what they were not given.
        self.variables = frozenset(
            node.name for tree in parsed for node in tree.find_all(nodes.Name) if node.ctx == "load"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: as from :func:`~mlx_paged_attention.text.messages.normalize_messages`; a content of
                nothing beside tool calls is ``None`` for templates that ask whether it is.
            tools: function definitions offered to the model.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further template variables, such as ``enable_thinking``.

        Raises:
            InvalidRequestError: the template refuses the conversation; the message is the template's own.
        """
        template = self._choose(with_tools=bool(tools))
        context = {**self._special_tokens, **variables}
        if self._tells_no_content:
            messages = [
                {**message, "content": None}
                if message.get("tool_calls") and not message["content"]
                else message
                for message in messages
            ]
        try:
            return template.render(
                context,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses this conversation: {error}", "messages"
            ) from error
        except Exception as error:  # Templates run model authors' code: any error of theirs is the request's.
            raise InvalidRequestError(
                f"the chat template cannot render this conversation: {type(error).__name__}: {error}",
                "messages",
            ) from error

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise InvalidRequestError(
            f"the model has chat templates named {', '.join(sorted(self._templates))} but none named default"
        )


def _is_content(node: nodes.Node) -> bool:
    """Whether it is a message's content, as an attribute or an item."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and node.arg == nodes.Const("content")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it stands for its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model never saw in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
